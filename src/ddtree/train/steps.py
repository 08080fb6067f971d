"""The steps of `ddtree train`: each reads what the ones before it left in the work folder, and leaves its own files."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

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
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN
from ddtree.train import export as exporting
from ddtree.train import synthesize as synthesizing
from ddtree.train.arguments import TrainConfig, from_arguments, option
from ddtree.train.conversations import ChatTemplate, read_user_messages
from ddtree.train.coupling import fit_coupling
from ddtree.train.data import (
    Corpus,
    draft_vocabulary,
    make_example,
    read_shard,
    shard_indices,
    teacher_pass,
)
from ddtree.train.distributed import Group
from ddtree.train.evaluate import EvaluationOptions, load_drafters, score_drafters
from ddtree.train.export import DRAFTER, EVALUATION, FIT, HEADS, NGRAMS, SUMMARY, machine, parameters
from ddtree.train.features import Teacher
from ddtree.train.initial import draft_config, feature_layers, initial_net, mask_token
from ddtree.train.jobs import DrafterJob, HeadsJob, build_heads
from ddtree.train.loss import LOSSES, Vocabulary
from ddtree.train.trainer import Trainer
from ddtree.train.training_log import HeldOutScore, ProgressLine, TrainProgressLine
from ddtree.train.work_folder import ANSWERS, began

_BATCH_SIZE, _CPU_BATCH_SIZE = 64, 2  # a CPU gains nothing from wide passes
# A head sees the path, so the target's distribution there is its label; Domino's published recipe takes the tokens
# that came.
_DEFAULT_LOSS = {"domino": "ce"}


@dataclass(frozen=True)
class DrafterOptions:
    """Settings of the step `fit` beside those of the training. Each field's help describes it."""

    features: str | None = option(
        None,
        "compute the target's features in every step, or read them from the disk, made first if need be "
        "(default: online where they are not there, except on a CPU)",
        choices=("online", "cached"),
    )
    draft_layers: int = option(2, "default: %(default)s")
    block: int = option(8, "block size, bonus token included (default: %(default)s)")
    mask_token: int | None = option(None, "token id of the masked slots (default: an unused one)")
    draft_vocabulary: int = option(8192, "tokens; 0 for all (default: %(default)s)")
    table_megabytes: float = option(4.0, "n-gram table; 0 for none (default: %(default)s)")
    traces: int = option(16, "answers to fit the noise coupling on; 0 leaves it out")


@dataclass(frozen=True)
class HeadOptions:
    """Settings of the step `heads`. Each field's help describes it."""

    heads: list[str] = option(
        [],
        f"{', '.join(KINDS)}, each with settings of its own, as in markov:rank=256",
        metavar="KIND[:NAME=VALUE,...]",
    )
    head_steps: int = option(1000, "default: %(default)s")
    head_minutes: float | None = option(None, "length by the clock, in place of a number of steps")
    head_learning_rate: float = option(1e-3, "default: %(default)s")
    head_loss: str | None = option(
        None, "of all heads (default: kl, but ce for domino; --soft mixes)", choices=LOSSES
    )


def synthesize(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Let the target write answers until there are enough, and print how many there are."""
    messages = read_user_messages(args.prompts) if args.prompts else None
    template = ChatTemplate.of(target.tokenizer, began(args.work))
    config = synthesis_config(args, target.device)
    synthesizer = synthesizing.Synthesizer(target, template, args.work / ANSWERS, config, messages)
    line = ProgressLine("synthesize", args.tokens, "answer tokens")
    summary = synthesizer.run(line.update)
    line.close()
    print(summary)


def synthesis_config(args: argparse.Namespace, device: torch.device) -> synthesizing.SynthesisConfig:
    """Return the settings of a synthesis, with the device's number of rows where the options name none."""
    rows = synthesizing.SynthesisConfig.rows if device.type == "cpu" else synthesizing.ROWS_ON_ACCELERATORS
    return from_arguments(synthesizing.SynthesisConfig, args, rows=rows if args.rows is None else args.rows)


def features(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Store the features of all answers."""
    store_features(Corpus(args.work / ANSWERS), target, feature_layers(target, args.draft_layers))


def store_features(corpus: Corpus, target: Target, layers: tuple[int, ...]) -> None:
    """Store the features of those answers that have none yet, with a progress line."""
    if not corpus.prepared(target, layers):
        line = ProgressLine("features", len(shard_indices(corpus.folder)), "shards")
        corpus.prepare(target, layers, line.update)
        line.close()


def train_config(args: argparse.Namespace, device: torch.device) -> TrainConfig:
    """Return the settings of a training, with the device's batch size where the options name none."""
    batch_size = args.conversations
    if batch_size is None:
        batch_size = _CPU_BATCH_SIZE if device.type == "cpu" else _BATCH_SIZE
    return from_arguments(TrainConfig, args, conversations=batch_size)


def fit(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Train the drafter, fit its noise coupling, and count the n-grams."""
    options = from_arguments(DrafterOptions, args)
    corpus = Corpus(args.work / ANSWERS)
    layers = feature_layers(target, options.draft_layers)
    teacher = _teacher(options.features, target, corpus, layers, group)
    weight = head_weight(target)
    ids = None
    if options.draft_vocabulary:
        ids = draft_vocabulary(corpus, options.draft_vocabulary, target.eos_ids)
    mask = mask_token(target, corpus) if options.mask_token is None else options.mask_token
    shape = draft_config(target, layers, options.draft_layers, options.block, mask)
    [example] = corpus.examples(corpus.train[:1], target, layers)
    network = initial_net(target, shape, example, args.seed).to(target.device)
    config = train_config(args, target.device)
    job = DrafterJob(network, Vocabulary(ids, weight), embedding_weight(target), config.objective)
    trainer = Trainer(job, corpus, args.work / FIT, config, target.device, teacher, group)
    best = _run(trainer, "fit", config, group)[DRAFTER]
    if group.sharded:
        network = DFlashNet(shape).to(target.device)
        network.load_state_dict(torch.load(args.work / FIT / f"{DRAFTER}.pt", weights_only=True))
    recipe = {
        **asdict(config),
        "processes": group.size,
        "optimizer_steps_done": trainer.step,
        "draft_layers": options.draft_layers,
        "block": options.block,
        "draft_vocabulary": options.draft_vocabulary,
        "held_out_loss": round(best.loss, 4),
        "held_out_chain": round(best.tau, 3),
    }
    # All processes run a sharded target, or none.
    if not (group.main or group.sharded):
        return
    coupling = PLAIN
    if options.traces:
        drafter = DFlash(Backbone(copy.deepcopy(network), target, draft_ids=ids))
        coupling = _coupling(target, drafter, corpus, options.traces)
        recipe |= {"coupling_beta": round(coupling[0], 4), "coupling_kappa": round(coupling[1], 4)}
    if not group.main:
        return
    write(args.work / DRAFTER, network, draft_ids=ids, coupling=coupling, dtype=torch.bfloat16)
    summary = {
        "target": "SmolLM2-135M-Instruct" if args.target == "demo" else args.target,
        "parameters": parameters(network),
        "data": _data_summary(corpus),
        "recipe": recipe,
        "machine": machine(target.device),
        "seconds": trainer.seconds,
    }
    exporting.write_json(args.work / SUMMARY, summary)
    if options.table_megabytes:
        build_table(corpus.answers(), args.work / NGRAMS, max_bytes=int(options.table_megabytes * 1e6))


def heads(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Train heads on the frozen drafter of the work folder, and fit the noise coupling of each."""
    options = from_arguments(HeadOptions, args)
    if not options.heads:
        raise ConfigError(f"name the heads to train: --heads {' '.join(KINDS)}")
    corpus = Corpus(args.work / ANSWERS)
    if not (args.work / DRAFTER / "config.json").exists():
        raise CheckpointError(f"{args.work / DRAFTER} is missing; run `ddtree train fit` first")
    checkpoint = read(args.work / DRAFTER)
    shape = checkpoint.config
    vocabulary = Vocabulary(checkpoint.draft_ids, head_weight(target))
    network = checkpoint.network().float().to(target.device)
    built = build_heads(options.heads, shape.hidden_size, vocabulary.size, args.seed)
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
    on_device = {kind: head.to(target.device) for kind, head in built.items()}
    job = HeadsJob(on_device, objectives, network, vocabulary, embedding_weight(target))
    teacher = _teacher(args.features, target, corpus, shape.target_layer_ids, group)
    trainer = Trainer(job, corpus, args.work / HEADS, config, target.device, teacher, group)
    best = _run(trainer, "heads", config, group)
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
    summary: dict[str, Any] = {
        "recipe": {**asdict(config), "processes": group.size, "optimizer_steps_done": trainer.step},
        "seconds": trainer.seconds,
        "machine": machine(target.device),
        "heads": {},
    }
    for kind, head in built.items():
        write_head(args.work / kind, head, coupling=couplings[kind])
        summary["heads"][kind] = {
            "coupling": couplings[kind],
            **head.config(),
            "loss": objectives[kind].loss,
            "parameters": parameters(head),
            "held_out_loss": round(best[kind].loss, 4),
            "held_out_chain": round(best[kind].tau, 3),
        }
    exporting.write_json(args.work / HEADS / SUMMARY, summary)


def evaluate(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Replay all drafters of the work folder along held-out answers, as chains and trees."""
    options = from_arguments(EvaluationOptions, args)
    corpus = Corpus(args.work / ANSWERS)
    summary = exporting.read_json(args.work / SUMMARY, "fit")
    drafters = load_drafters(args.work, target, second_pass=bool(summary["recipe"]["prefix_share"]))
    layers = drafters[DRAFTER].feature_layers
    sets = {"held-out": corpus.examples(corpus.held_out[: options.limit], target, layers)}
    if options.answers:
        prefix, conversations = read_shard(options.answers)
        conversations = conversations[: options.limit]
        texts = [prefix + [int(token) for token in c.tokens] for c in conversations]
        found = teacher_pass(target, texts, layers)
        sets[options.answers.stem] = [
            make_example(prefix, c, own) for c, own in zip(conversations, found, strict=True)
        ]
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


def head_weight(target: Target) -> Tensor:
    """Return the head's matrix [V, H].

    Raises:
        ConfigError: the head has a bias, which the drafter's layout has no place for.
    """
    if getattr(target.head, "bias", None) is not None:
        raise ConfigError(
            "the target's head has a bias, which a drafter with a reduced vocabulary cannot carry"
        )
    return target.head.weight.detach()  # type: ignore[operator]


def embedding_weight(target: Target) -> Tensor:
    """Return the embedding's matrix [V, H]."""
    return target.embed.weight.detach()  # type: ignore[operator]


def _run(trainer: Trainer, label: str, config: TrainConfig, group: Group) -> dict[str, HeldOutScore]:
    """Run a trainer, with a progress line in the main process; return the best scores."""
    if not group.main:
        return trainer.run()
    line = TrainProgressLine(label, config.steps, config.minutes)
    best = trainer.run(line.update)
    line.close()
    return best


def _teacher(
    mode: str | None, target: Target, corpus: Corpus, layers: tuple[int, ...], group: Group
) -> Teacher | None:
    """Return what computes features in every step; None if they are read from disk, stored first if need be."""
    stored = corpus.prepared(target, layers)
    if mode == "online" or (mode is None and not stored and target.device.type != "cpu"):
        return Teacher(target, layers, group)
    if not stored and group.sharded:
        raise ConfigError("features cannot be stored by a sharded target: run `ddtree train features` first")
    if group.main:
        store_features(corpus, target, layers)
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
