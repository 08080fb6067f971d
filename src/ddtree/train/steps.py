"""The step `fit` of `ddtree train`: a fitted drafter, its noise coupling, and the n-gram table."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.drafters import Drafter
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.drafters.dflash.checkpoint import read, write
from ddtree.drafters.dflash.d2sd import D2SD
from ddtree.drafters.dflash.domino import Domino
from ddtree.drafters.dflash.drafter import DFlash, backbone_of
from ddtree.drafters.dflash.first_order import FirstOrder
from ddtree.drafters.dflash.head_checkpoint import write_head
from ddtree.drafters.dflash.heads import KINDS, Head, create
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.drafters.loading import NGRAMS as TABLE_PART
from ddtree.drafters.loading import load_drafter, with_head
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram_builder import build_table
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.target import Target
from ddtree.progress import ProgressLine
from ddtree.sampling.noise import PLAIN
from ddtree.train import export as exporting
from ddtree.train.coupling import CouplingFit, fit_coupling
from ddtree.train.data import (
    Corpus,
    Example,
    draft_vocabulary,
    make_example,
    read_shard,
    shard_indices,
    teacher_pass,
)
from ddtree.train.distributed import Group
from ddtree.train.evaluate import replay
from ddtree.train.export import DRAFTER, EVALUATION, HEADS, NGRAMS, SUMMARY, Figure, read_json, write_json
from ddtree.train.features import Teacher
from ddtree.train.fsdp import alone, shard, whole
from ddtree.train.initial import draft_config, feature_layers, initial_net, mask_token
from ddtree.train.jobs import DrafterJob, HeadsJob
from ddtree.train.loss import LOSSES, Vocabulary
from ddtree.train.trainer import Fit, FitConfig, run_fit

_CONVERSATIONS = {"cpu": 2}  # a CPU gains nothing from wide passes
_MANY_CONVERSATIONS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fit`."""
    fit = FitConfig()
    group = parser.add_argument_group("fit")
    group.add_argument("--steps", type=int, default=fit.steps, help="optimizer steps (default: %(default)s)")
    group.add_argument(
        "--minutes", type=float, help="length of the fit by the clock, in place of a number of steps"
    )
    group.add_argument(
        "--conversations", type=int, help="of a pass (default: 2 on a CPU, 64 on other devices)"
    )
    group.add_argument(
        "--accumulate", type=int, default=fit.accumulate, help="passes of a step (default: %(default)s)"
    )
    group.add_argument(
        "--anchors", type=int, default=fit.anchors, help="per conversation (default: %(default)s)"
    )
    group.add_argument("--learning-rate", type=float, default=fit.learning_rate, help="default: %(default)s")
    group.add_argument("--weight-decay", type=float, default=fit.weight_decay, help="default: %(default)s")
    group.add_argument(
        "--loss", choices=LOSSES, default=fit.loss, help="what is minimized (default: %(default)s)"
    )
    group.add_argument(
        "--gamma", type=float, default=fit.gamma, help="decay of the slots' weights (default: %(default)s)"
    )
    group.add_argument(
        "--soft",
        type=float,
        default=fit.soft,
        help="share of the target's distribution in the labels (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-share",
        type=float,
        default=fit.prefix_share,
        help="share of the blocks that begin with known tokens, for D2SD's second pass (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-decay",
        type=float,
        default=fit.prefix_decay,
        help="ratio of the chances of successive prefix lengths (default: %(default)s)",
    )
    group.add_argument(
        "--ema", type=float, default=fit.ema, help="decay of the weights' average; 0 for none (default)"
    )
    group.add_argument(
        "--evaluate-every",
        type=int,
        default=fit.evaluate_every,
        help="steps between looks at held-out answers, each a checkpoint (default: %(default)s)",
    )
    group.add_argument(
        "--look-at", type=int, default=fit.look_at, help="conversations of a look (default: %(default)s)"
    )
    group.add_argument(
        "--patience", type=int, default=fit.patience, help="looks without gain; 0 never stops (default: 3)"
    )
    group.add_argument(
        "--features",
        choices=("online", "cached"),
        help="compute the target's features in every step, or read them from the disk, made first if need be "
        "(default: online where they are not there, except on a CPU)",
    )
    group.add_argument("--draft-layers", type=int, default=2, help="default: %(default)s")
    group.add_argument(
        "--block", type=int, default=8, help="block size, bonus token included (default: %(default)s)"
    )
    group.add_argument("--mask-token", type=int, help="token id of the masked slots (default: an unused one)")
    group.add_argument(
        "--draft-vocabulary", type=int, default=8192, help="tokens; 0 for all (default: %(default)s)"
    )
    group.add_argument(
        "--table-megabytes",
        type=float,
        default=4.0,
        help="n-gram table; 0 for none (default: %(default)s)",
    )
    group.add_argument(
        "--traces", type=int, default=16, help="answers to fit the noise coupling on; 0 leaves it out"
    )


def config_of(args: argparse.Namespace, device: torch.device) -> FitConfig:
    """The fit's settings, with the device's defaults."""
    values = {field.name: getattr(args, field.name) for field in fields(FitConfig)}
    if args.conversations is None:
        values["conversations"] = _CONVERSATIONS.get(device.type, _MANY_CONVERSATIONS)
    return FitConfig(**values)


def fit(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Fit the drafter and count the n-grams."""
    corpus = Corpus(args.work / "answers")
    layers = feature_layers(target, args.draft_layers)
    teacher = teacher_of(args, target, corpus, layers, group)
    weight = head_weight(target)
    ids = None
    if args.draft_vocabulary:
        ids = draft_vocabulary(corpus, args.draft_vocabulary, target.eos_ids)
    mask = mask_token(target, corpus) if args.mask_token is None else args.mask_token
    shape = draft_config(target, layers, args.draft_layers, args.block, mask)
    [example] = corpus.examples(corpus.train[:1], target, layers)
    network = initial_net(target, shape, example, args.seed)
    config = config_of(args, target.device)
    embedding = target.embed.weight.detach()  # type: ignore[operator]
    job = DrafterJob(network, Vocabulary(ids, weight), embedding, config.objective)
    if group.sharded:
        shard(job.run, network.layers, target.device)
    else:
        network.to(target.device)
    fitting = Fit(job, corpus, args.work / "fit", config, target.device, teacher, group)
    best = run_fit(fitting, "fit", config, group)[DRAFTER]
    seconds = fitting.seconds
    if group.sharded:
        weights = whole(network.state_dict())
        network = DFlashNet(shape).to(target.device)
        network.load_state_dict(weights)
    recipe = {
        **asdict(config),
        "processes": group.size,
        "optimizer_steps_done": fitting.step,
        "draft_layers": args.draft_layers,
        "block": args.block,
        "draft_vocabulary": args.draft_vocabulary,
        "held_out_loss": round(best.loss, 4),
        "held_out_chain": round(best.chain, 3),
    }
    coupling = PLAIN
    with alone(group, target) as main:
        if main and args.traces:
            drafter = DFlash(Backbone(copy.deepcopy(network), target, draft_ids=ids))
            coupled = couple(target, drafter, corpus, args.traces)
            coupling = (coupled.beta, coupled.kappa)
            recipe |= {"coupling_beta": round(coupled.beta, 4), "coupling_kappa": round(coupled.kappa, 4)}
    if not group.main:
        return
    write(args.work / DRAFTER, network, draft_ids=ids, coupling=coupling, dtype=torch.bfloat16)
    exporting.write_json(args.work / SUMMARY, summary(args, target, corpus, network, recipe, seconds))
    if args.table_megabytes:
        build_table(corpus.answers(), args.work / NGRAMS, max_bytes=int(args.table_megabytes * 1e6))


def teacher_of(
    args: argparse.Namespace, target: Target, corpus: Corpus, layers: tuple[int, ...], group: Group
) -> Teacher | None:
    """What computes features in every step; None where they are read from the disk, which are made first."""
    mode = args.features
    if mode is None:
        there = target.device.type == "cpu" or corpus.prepared(target, layers)
        mode = "cached" if there else "online"
    if mode == "online":
        return Teacher(target, layers, group)
    with alone(group, target) as main:
        if main:
            store_features(corpus, target, layers)
    group.wait()
    return None


def store_features(corpus: Corpus, target: Target, layers: tuple[int, ...]) -> None:
    """Compute the features of all answers once, and keep them."""
    if corpus.prepared(target, layers):
        return
    line = ProgressLine("features", len(shard_indices(corpus.folder)), "shards")
    corpus.prepare(target, layers, line.update)
    line.close()


def couple(target: Target, drafter: DFlash | FirstOrder | Domino, corpus: Corpus, traces: int) -> CouplingFit:
    """Fit the noise coupling while a drafter decodes held-out user turns at temperature 1."""
    turns = [corpus.conversations[index] for index in corpus.held_out[:traces]]
    return fit_coupling(target, drafter, [corpus.prefix + c.tokens[: c.answer_start].tolist() for c in turns])


def summary(
    args: argparse.Namespace,
    target: Target,
    corpus: Corpus,
    network: nn.Module,
    recipe: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """What the card tells of the data and the fit."""
    conversations = corpus.conversations
    return {
        "target": "SmolLM2-135M-Instruct" if args.target == "demo" else args.target,
        "parameters": exporting.parameters(network),
        "data": {
            "conversations": len(conversations),
            "held_out": len(corpus.held_out),
            "answer_tokens": corpus.answer_tokens,
            "greedy_share": sum(c.greedy for c in conversations) / len(conversations),
            **synthesis(args.work / "answers"),
            "max_answer": max(len(c.tokens) - c.answer_start for c in conversations),
        },
        "recipe": recipe,
        "machine": exporting.machine(target.device),
        "seconds": seconds,
    }


def synthesis(folder: Path) -> dict[str, Any]:
    """How user turns came about, as far as a folder of answers says."""
    path = folder / "synthesis.json"
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"turns_given": bool(noted.get("prompts")), "turn_top_p": noted.get("turn_top_p")}


def head_weight(target: Target) -> Tensor:
    """The head's matrix. Raises ConfigError for a head with a bias, which the drafter's layout has no place for."""
    if getattr(target.head, "bias", None) is not None:
        raise ConfigError(
            "the target's head has a bias, which a drafter with a reduced vocabulary cannot carry"
        )
    return target.head.weight.detach()  # type: ignore[operator]


# What each head learns by default. A head sees the path, so the target's distribution there is its label; Domino's
# published recipe takes the tokens that came.
_LOSS = {"domino": "ce"}
_DEFAULT_LOSS = "kl"
_SIZES = {
    "markov": ("size",),
    "treeflash": ("hidden_size",),
    "domino": ("hidden_size", "size"),
}


def add_head_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `heads`."""
    group = parser.add_argument_group("heads", "options of `fit` that are not named here hold for both")
    group.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="KIND[:NAME=VALUE,...]",
        help=f"{', '.join(KINDS)}, each with settings of its own, as in markov:rank=256",
    )
    group.add_argument("--head-steps", type=int, default=1000, help="default: %(default)s")
    group.add_argument(
        "--head-minutes", type=float, help="length by the clock, in place of a number of steps"
    )
    group.add_argument("--head-learning-rate", type=float, default=1e-3, help="default: %(default)s")
    group.add_argument(
        "--head-loss", choices=LOSSES, help="of all heads (default: kl, but ce for domino; --soft mixes)"
    )


def fit_heads(args: argparse.Namespace, target: Target, group: Group) -> None:
    """Train heads on the frozen drafter of the work folder."""
    if not args.heads:
        raise ConfigError(f"name the heads to train: --heads {' '.join(KINDS)}")
    corpus = Corpus(args.work / "answers")
    if not (args.work / DRAFTER / "config.json").exists():
        raise CheckpointError(f"{args.work / DRAFTER} is missing; run `ddtree train fit` first")
    found = read(args.work / DRAFTER)
    shape, weight = found.config, head_weight(target)
    vocabulary = Vocabulary(found.draft_ids, weight)
    net = found.network().float().to(target.device)
    embedding = target.embed.weight.detach()  # type: ignore[operator]
    heads = made(args.heads, shape.hidden_size, vocabulary.size, args.seed)
    config = heads_config(args, target.device)
    objectives = {
        kind: replace(config.objective, loss=args.head_loss or _LOSS.get(kind, _DEFAULT_LOSS))
        for kind in heads
    }
    job = HeadsJob(
        {kind: head.to(target.device) for kind, head in heads.items()}, objectives, net, vocabulary, embedding
    )
    teacher = teacher_of(args, target, corpus, shape.target_layer_ids, group)
    fit = Fit(job, corpus, args.work / HEADS, config, target.device, teacher, group)
    best = run_fit(fit, "heads", config, group)
    couplings = dict.fromkeys(heads, found.layout.coupling)
    with alone(group, target) as main:
        if main and args.traces:
            backbone = backbone_of(read(args.work / DRAFTER), target)
            for kind, head in heads.items():
                drafter = with_head(backbone, copy.deepcopy(head), PLAIN)
                assert isinstance(drafter, FirstOrder | Domino)
                coupled = couple(target, drafter, corpus, args.traces)
                couplings[kind] = (coupled.beta, coupled.kappa)
    if not group.main:
        return
    summary: dict[str, Any] = {
        "recipe": {**asdict(config), "processes": group.size, "optimizer_steps_done": fit.step},
        "seconds": fit.seconds,
        "machine": exporting.machine(target.device),
        "heads": {},
    }
    for kind, head in heads.items():
        write_head(args.work / kind, head, coupling=couplings[kind])
        summary["heads"][kind] = {
            "coupling": couplings[kind],
            **head.config(),
            "loss": objectives[kind].loss,
            "parameters": exporting.parameters(head),
            "held_out_loss": round(best[kind].loss, 4),
            "held_out_chain": round(best[kind].chain, 3),
        }
    exporting.write_json(args.work / HEADS / exporting.SUMMARY, summary)


def heads_config(args: argparse.Namespace, device: torch.device) -> FitConfig:
    return replace(
        config_of(args, device),
        steps=args.head_steps,
        minutes=args.head_minutes,
        learning_rate=args.head_learning_rate,
        prefix_share=0.0,
    )


def made(specs: list[str], hidden_size: int, size: int, seed: int) -> dict[str, Head]:
    """The heads that the options name, with random weights.

    Raises:
        ConfigError: an option names no head, or one twice.
        CheckpointError: a head does not take the settings.
    """
    sizes = {"hidden_size": hidden_size, "size": size}
    heads: dict[str, Head] = {}
    for spec in specs:
        kind, _, text = spec.partition(":")
        if kind not in KINDS or kind in heads:
            raise ConfigError(f"--heads {spec}: name each of {', '.join(KINDS)} at most once")
        settings: dict[str, Any] = {name: sizes[name] for name in _SIZES[kind]}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                settings[name] = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"--heads {spec}: {part} is not NAME=NUMBER") from error
        torch.manual_seed(seed)
        heads[kind] = create(kind, **settings)
    return heads


def fitted_heads(work: Path) -> list[str]:
    """Kinds of the heads that a work folder or finished drafter holds."""
    return [kind for kind in KINDS if (work / kind / "config.json").exists()]


_ROWS = {"cpu": 16}
_MANY_ROWS = 64


def add_figure_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate`."""
    group = parser.add_argument_group("evaluate")
    group.add_argument("--answers", type=Path, help="a shard to evaluate on beside the held-out answers")
    group.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32], help="default: 8 16 32")
    group.add_argument(
        "--limit", type=int, default=200, help="most conversations of a set (default: %(default)s)"
    )


def evaluate(args: argparse.Namespace, target: Target) -> None:
    """Replay all drafters of the work folder along held-out answers, as chains and trees."""
    corpus = Corpus(args.work / "answers")
    summary = read_json(args.work / SUMMARY, "fit")
    found = drafters(args.work, target, second_pass=bool(summary["recipe"]["prefix_share"]))
    layers = found[DRAFTER].feature_layers
    sets = {"held-out": corpus.examples(corpus.held_out[: args.limit], target, layers)}
    if args.answers:
        prefix, conversations = read_shard(args.answers)
        conversations = conversations[: args.limit]
        texts = [prefix + [int(token) for token in c.tokens] for c in conversations]
        features = teacher_pass(target, texts, layers)
        sets[args.answers.stem] = [
            make_example(prefix, c, f) for c, f in zip(conversations, features, strict=True)
        ]
    figures = []
    for name, examples in sets.items():
        for greedy in (True, False):
            chosen = [example for example in examples if example.greedy == greedy]
            if chosen:
                figures += measure(name, chosen, found, args.budgets, target)
                write_json(args.work / EVALUATION, [asdict(figure) for figure in figures])


def drafters(work: Path, target: Target, second_pass: bool = False) -> dict[str, Drafter]:
    """What there is to measure, by name; without rows.

    Args:
        work: the folder.
        target: to draft for.
        second_pass: whether the network was trained with given prefixes, so that D2SD can draft with it.
    """
    found: dict[str, Drafter] = {}
    for name in (DRAFTER, *fitted_heads(work)):
        found[name] = _loaded(work / name, target)
    if second_pass:
        checkpoint = read(work / DRAFTER)
        found["d2sd"] = D2SD(backbone_of(checkpoint, target), coupling=checkpoint.layout.coupling)
    if (work / NGRAMS).exists():
        found["n-grams"] = _loaded(work / TABLE_PART, target)
        found[f"{DRAFTER} + n-grams"] = Merged([found[DRAFTER], found["n-grams"]])
    return found


def _loaded(path: Path, target: Target) -> Drafter:
    drafter = load_drafter(path, target)
    assert drafter is not None
    return drafter


def measure(
    name: str, examples: list[Example], found: dict[str, Drafter], budgets: list[int], target: Target
) -> list[Figure]:
    """Tokens per round of each drafter at each budget, printed as they come."""
    figures = []
    rows, dtype = _ROWS.get(target.device.type, _MANY_ROWS), target.dtype
    for label, drafter in found.items():
        depth = drafter.max_depth
        tau = {"chain": replay(drafter, examples, depth, chain=True, rows=rows, dtype=dtype).tau}
        for budget in budgets:
            tau[f"B={budget}"] = replay(drafter, examples, budget, rows=rows, dtype=dtype).tau
        figures.append(Figure(name, len(examples), label, 0 if examples[0].greedy else 1, tau))
        cells = ", ".join(f"{key} {value:.2f}" for key, value in tau.items())
        print(f"{name}, T={figures[-1].temperature}, {label}: {cells}", flush=True)
    return figures
