"""The step `fit` of `ddtree train`: a fitted drafter, its noise coupling, and the n-gram table."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.drafters.backbone import Backbone
from ddtree.drafters.checkpoint import write
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash_net import DFlashNet
from ddtree.drafters.domino import Domino
from ddtree.drafters.firstorder import FirstOrder
from ddtree.drafters.ngram_counts import build_table
from ddtree.errors import ConfigError
from ddtree.noise import PLAIN
from ddtree.progress import ProgressLine
from ddtree.target import Target
from ddtree.train import export as exporting
from ddtree.train.coupling import CouplingFit, fit_coupling
from ddtree.train.data import Corpus, draft_vocabulary, shard_indices
from ddtree.train.drafter_job import DrafterJob
from ddtree.train.export import DRAFTER, NGRAMS, SUMMARY
from ddtree.train.fit import Fit, FitConfig
from ddtree.train.group import Group
from ddtree.train.initial import draft_config, feature_layers, initial_net, mask_token
from ddtree.train.objective import LOSSES, Vocabulary
from ddtree.train.reporting import run_fit
from ddtree.train.sharding import alone, shard, whole
from ddtree.train.teacher import Teacher

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
