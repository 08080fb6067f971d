"""`ddtree train`: from a target to a drafter, in steps that can each be stopped and taken up again.

Each step reads what the ones before it left in the work folder, and leaves its own files.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.checkpoint import backbone_of, read, write
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.head_checkpoint import write_head
from ddtree.drafters.dflash.heads import KINDS
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.drafters.loading import with_head
from ddtree.drafters.ngram_builder import build_table
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.pretrained import choose_device, load_causal_lm
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN
from ddtree.train import export as exporting
from ddtree.train import work_folder
from ddtree.train.arguments import (
    ROWS_ON_ACCELERATORS,
    DrafterOptions,
    EvaluationOptions,
    HeadOptions,
    SynthesisConfig,
    TrainConfig,
    add_options,
    from_arguments,
)
from ddtree.train.conversations import ChatTemplate, read_user_messages
from ddtree.train.coupling import fit_coupling
from ddtree.train.data import Corpus, Teacher, make_examples, read_shard
from ddtree.train.distributed import Group, local_device, wants_fsdp
from ddtree.train.evaluate import load_drafters, score_drafters
from ddtree.train.export import DRAFTER, EVALUATION, FIT, HEADS, NGRAMS, SUMMARY, machine, parameters
from ddtree.train.initial import draft_config, draft_vocabulary, feature_layers, initial_net, mask_token
from ddtree.train.jobs import DrafterJob, HeadsJob, TrainingBackbone, build_heads
from ddtree.train.synthesize import Synthesizer
from ddtree.train.trainer import Trainer
from ddtree.train.training_log import HeldOutScore

_BATCH_SIZE, _CPU_BATCH_SIZE = 64, 2  # a CPU gains nothing from wide passes
# A head sees the path, so the target's distribution there is its label; Domino's published recipe takes the tokens
# that came.
_DEFAULT_LOSS = {"domino": "ce"}


def synthesize(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Let the target write answers until there are enough, and print how many there are."""
    messages = read_user_messages(args.prompts) if args.prompts else None
    template = ChatTemplate.of(target.tokenizer, work_folder.began(args.work))
    config = synthesis_config(args, target.device)
    print(Synthesizer(target, template, args.work / work_folder.ANSWERS, config, messages).run())


def synthesis_config(args: argparse.Namespace, device: torch.device) -> SynthesisConfig:
    """Return the settings of a synthesis, with the device's number of rows where the options name none."""
    rows = SynthesisConfig.rows if device.type == "cpu" else ROWS_ON_ACCELERATORS
    return from_arguments(SynthesisConfig, args, rows=rows if args.rows is None else args.rows)


def features(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Store the features of all answers."""
    Corpus(args.work / work_folder.ANSWERS).prepare(target, feature_layers(target, args.draft_layers))


def train_config(args: argparse.Namespace, device: torch.device) -> TrainConfig:
    """Return the settings of a training, with the device's batch size where the options name none."""
    batch_size = args.conversations
    if batch_size is None:
        batch_size = _CPU_BATCH_SIZE if device.type == "cpu" else _BATCH_SIZE
    return from_arguments(TrainConfig, args, conversations=batch_size)


def fit(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Train the drafter, fit its noise coupling, and count the n-grams."""
    options, config = from_arguments(DrafterOptions, args), train_config(args, target.device)
    corpus = Corpus(args.work / work_folder.ANSWERS)
    layers = feature_layers(target, options.draft_layers)
    teacher = _teacher(options.features, target, corpus, layers, group)
    ids = None
    if options.draft_vocabulary:
        ids = draft_vocabulary(corpus, options.draft_vocabulary, target.eos_ids)
    mask = mask_token(target, corpus) if options.mask_token is None else options.mask_token
    shape = draft_config(target, layers, options.draft_layers, options.block, mask)
    [example] = corpus.examples(corpus.train[:1], target, layers)
    network = initial_net(target, shape, example, args.seed).to(target.device)
    job = DrafterJob(TrainingBackbone.of(network, target, ids), config.objective)
    trainer = Trainer(job, corpus, args.work / FIT, config, target.device, teacher, group)
    best = trainer.run()[DRAFTER]
    # All processes run a sharded target, or none.
    if not (group.main or group.sharded):
        return
    if group.sharded:
        network = DFlashNet(shape).to(target.device)
        network.load_state_dict(torch.load(args.work / FIT / f"{DRAFTER}.pt", weights_only=True))
    coupling = PLAIN
    if options.traces:
        drafter = DFlash(Backbone(copy.deepcopy(network), target, draft_ids=ids))
        coupling = _coupling(target, drafter, corpus, options.traces)
    if not group.main:
        return
    write(args.work / DRAFTER, network, draft_ids=ids, coupling=coupling, dtype=torch.bfloat16)
    summary = {
        "target": "SmolLM2-135M-Instruct" if args.target == "demo" else args.target,
        "parameters": parameters(network),
        "data": _data_summary(corpus),
        **_run_summary(trainer, config, group, target),
    }
    summary["recipe"] |= {
        "draft_layers": options.draft_layers,
        "block": options.block,
        "draft_vocabulary": options.draft_vocabulary,
        **_scores(best),
    }
    if options.traces:
        beta, kappa = coupling
        summary["recipe"] |= {"coupling_beta": round(beta, 4), "coupling_kappa": round(kappa, 4)}
    exporting.write_json(args.work / SUMMARY, summary)
    if options.table_megabytes:
        build_table(corpus.answers(), args.work / NGRAMS, max_bytes=int(options.table_megabytes * 1e6))


def heads(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Train heads on the frozen drafter of the work folder, and fit the noise coupling of each."""
    options = from_arguments(HeadOptions, args)
    if not options.heads:
        raise ConfigError(f"name the heads to train: --heads {' '.join(KINDS)}")
    corpus = Corpus(args.work / work_folder.ANSWERS)
    if not (args.work / DRAFTER / "config.json").exists():
        raise CheckpointError(f"{args.work / DRAFTER} is missing; run `ddtree train fit` first")
    checkpoint = read(args.work / DRAFTER)
    network = checkpoint.network().float().to(target.device)
    trunk = TrainingBackbone.of(network, target, checkpoint.draft_ids)
    built = {
        kind: head.to(target.device)
        for kind, head in build_heads(
            options.heads, network.config.hidden_size, trunk.vocabulary.size, args.seed
        ).items()
    }
    config = replace(
        train_config(args, target.device),
        steps=options.head_steps,
        minutes=options.head_minutes,
        learning_rate=options.head_learning_rate,
        prefix_share=0.0,
    )
    objectives = {
        kind: replace(config.objective, loss=options.head_loss or _DEFAULT_LOSS.get(kind, "kl"))
        for kind in built
    }
    teacher = _teacher(args.features, target, corpus, network.config.target_layer_ids, group)
    job = HeadsJob(built, objectives, trunk)
    trainer = Trainer(job, corpus, args.work / HEADS, config, target.device, teacher, group)
    best = trainer.run()
    if not (group.main or group.sharded):
        return
    couplings = dict.fromkeys(built, checkpoint.layout.coupling)
    if args.traces:
        backbone = backbone_of(read(args.work / DRAFTER), target)
        for kind, head in built.items():
            drafter = with_head(backbone, copy.deepcopy(head), PLAIN)
            assert isinstance(drafter, FirstOrder | Domino)
            couplings[kind] = _coupling(target, drafter, corpus, args.traces)
    if not group.main:
        return
    summary = {**_run_summary(trainer, config, group, target), "heads": {}}
    for kind, head in built.items():
        write_head(args.work / kind, head, coupling=couplings[kind])
        summary["heads"][kind] = {
            "coupling": couplings[kind],
            **head.config(),
            "loss": objectives[kind].loss,
            "parameters": parameters(head),
            **_scores(best[kind]),
        }
    exporting.write_json(args.work / HEADS / SUMMARY, summary)


def evaluate(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Replay all drafters of the work folder along held-out answers, as chains and trees."""
    options = from_arguments(EvaluationOptions, args)
    corpus = Corpus(args.work / work_folder.ANSWERS)
    summary = exporting.read_json(args.work / SUMMARY, "fit")
    drafters = load_drafters(args.work, target, second_pass=bool(summary["recipe"]["prefix_share"]))
    layers = drafters[DRAFTER].feature_layers
    sets = {"held-out": corpus.examples(corpus.held_out[: options.limit], target, layers)}
    if options.answers:
        prefix, conversations = read_shard(options.answers)
        sets[options.answers.stem] = make_examples(prefix, conversations[: options.limit], target, layers)
    scores = []
    for name, examples in sets.items():
        for greedy in (True, False):
            chosen = [example for example in examples if example.greedy == greedy]
            if chosen:
                scores += score_drafters(name, chosen, drafters, options.budgets, target)
                exporting.write_json(args.work / EVALUATION, [asdict(score) for score in scores])


def export(args: argparse.Namespace, target: Target | None, group: Group) -> None:
    """Copy the finished drafter to the folder that the options name, and print its path."""
    out = args.out or args.work / "export"
    exporting.export(args.work, out)
    print(f"the drafter is in {out}")


def plot(args: argparse.Namespace, target: Target | None, group: Group) -> None:
    """Draw the logs, and print the pictures' paths."""
    print(*exporting.plot(args.work), sep="\n")


def _teacher(
    mode: str | None, target: Target, corpus: Corpus, layers: tuple[int, ...], group: Group
) -> Teacher | None:
    """Return what computes features in every step; None if they are read from disk, stored first if need be."""
    stored = corpus.prepared(target, layers)
    if mode == "online" or (mode is None and not stored and target.device.type != "cpu"):
        return Teacher(target, layers, group)
    if not stored and group.sharded:
        raise ConfigError("features cannot be stored by a sharded target: run `ddtree train features` first")
    if not stored and group.main:
        corpus.prepare(target, layers)
    group.wait()
    return None


def _coupling(
    target: Target, drafter: DFlash | FirstOrder | Domino, corpus: Corpus, traces: int
) -> tuple[float, float]:
    """Fit (beta, kappa) while a drafter decodes held-out user messages at temperature 1."""
    held_out = [corpus.conversations[index] for index in corpus.held_out[:traces]]
    prompts = [corpus.prefix + c.tokens[: c.answer_start].tolist() for c in held_out]
    found = fit_coupling(target, drafter, prompts)
    return found.beta, found.kappa


def _run_summary(trainer: Trainer, config: TrainConfig, group: Group, target: Target) -> dict[str, Any]:
    """Return the settings of a training, its device and its length."""
    return {
        "recipe": {**asdict(config), "processes": group.size, "optimizer_steps_done": trainer.step},
        "machine": machine(target.device),
        "seconds": trainer.seconds,
    }


def _scores(best: HeldOutScore) -> dict[str, float]:
    return {"held_out_loss": round(best.loss, 4), "held_out_chain": round(best.tau, 3)}


def _data_summary(corpus: Corpus) -> dict[str, Any]:
    """Return what the model card says of the data."""
    conversations = corpus.conversations
    note = corpus.folder / "synthesis.json"
    settings = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
    return {
        "conversations": len(conversations),
        "held_out": len(corpus.held_out),
        "answer_tokens": corpus.answer_tokens,
        "greedy_share": sum(c.greedy for c in conversations) / len(conversations),
        "turns_given": bool(settings.get("prompts")),
        "turn_top_p": settings.get("turn_top_p"),
        "max_answer": max(len(c.tokens) - c.answer_start for c in conversations),
    }


_STEPS: dict[str, Callable[..., None]] = {
    "synthesize": synthesize,
    "features": features,
    "fit": fit,
    "heads": heads,
    "evaluate": evaluate,
    "export": export,
    "plot": plot,
}
_WITHOUT_TARGET = {"export", "plot"}
_IN_ALL_PROCESSES = {"fit", "heads"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree train`."""
    parser.add_argument(
        "step", nargs="?", choices=("all", *_STEPS), default="all", help="one step, or all of them"
    )
    parser.add_argument("--target", default="demo", help="checkpoint folder or hub id (default: demo)")
    parser.add_argument("--work", type=Path, default=Path("ddtree-train"), help="folder for data and state")
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew: delete what an earlier training left in WORK"
    )
    parser.add_argument("--out", type=Path, help="folder of the finished drafter (default: WORK/export)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cuda, mps or cpu (default: cpu)")
    parser.add_argument("--dtype", help="of the target: bfloat16 or float32 (default: the checkpoint's own)")
    parser.add_argument(
        "--fsdp",
        action="store_true",
        help="in `fit` and `heads`, shard the target, the drafter and its optimizer over the GPUs of torchrun or "
        "accelerate launch",
    )
    group = parser.add_argument_group("synthesize")
    add_options(group, SynthesisConfig)
    group.add_argument(
        "--prompts",
        type=Path,
        help='JSON lines with user turns to answer, {"prompt"}, {"turns"} or {"messages"}: the first turn of each '
        "(default: the target writes its own)",
    )
    group = parser.add_argument_group("fit")
    add_options(group, TrainConfig)
    add_options(group, DrafterOptions)
    group = parser.add_argument_group("heads", "options of `fit` that are not named here hold for both")
    add_options(group, HeadOptions)
    add_options(parser.add_argument_group("evaluate"), EvaluationOptions)


def run(args: argparse.Namespace) -> int:
    """Run the steps that the options name; return the exit code.

    Raises:
        DDTreeError: an error that a user can cause.
    """
    chosen = [args.step]
    if args.step == "all":
        apart = {"features", "plot"} if args.heads else {"features", "heads", "plot"}
        chosen = [step for step in _STEPS if step not in apart]
    device = choose_device(local_device(args.device))
    sharded = wants_fsdp(args.fsdp, device)
    if sharded and not set(chosen) <= _IN_ALL_PROCESSES:
        raise ConfigError(
            "FSDP trains: run the steps fit and heads with it, each by itself, and others without"
        )
    if args.fresh:
        if "synthesize" not in chosen:
            raise ConfigError(
                f"--fresh begins a training anew, and {args.step} needs what is there: leave it out"
            )
        # Before anything is deleted: both raise for what cannot be used.
        synthesis_config(args, device)
        if args.prompts:
            read_user_messages(args.prompts)
    loaded = None
    made_with: dict[str, str] = {}
    if not set(chosen) <= _WITHOUT_TARGET:
        # Before the processes meet: afterwards transformers may let the first of them alone load.
        loaded = load_causal_lm(args.target, "cpu" if sharded else device, args.dtype)
        made_with = work_folder.describe(*loaded)
    group = Group.join(device, sharded)
    try:
        if loaded and sharded:
            group.shard_target(loaded[0], device)
        target = Target(*loaded, graphs=not sharded) if loaded else None
        if target and group.main:
            work_folder.prepare(args.work, args.target, made_with, args.fresh)
        group.wait()
        for step in chosen:
            if group.main or step in _IN_ALL_PROCESSES:
                _STEPS[step](args, target, group)
            group.wait()
    finally:
        group.leave()
    return 0
