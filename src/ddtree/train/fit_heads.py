"""The step `heads` of `ddtree train`: heads beside a fitted drafter."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ddtree.drafters.checkpoint import read
from ddtree.drafters.dflash import backbone_of
from ddtree.drafters.domino import Domino
from ddtree.drafters.firstorder import FirstOrder
from ddtree.drafters.heads import Head
from ddtree.drafters.heads.files import write_head
from ddtree.drafters.heads.registry import KINDS, create
from ddtree.drafters.loading import with_head
from ddtree.errors import CheckpointError, ConfigError
from ddtree.noise import PLAIN
from ddtree.target import Target
from ddtree.train import export as exporting
from ddtree.train.data import Corpus
from ddtree.train.export import DRAFTER, HEADS
from ddtree.train.fit import Fit, FitConfig
from ddtree.train.fitting import config_of, couple, head_weight, teacher_of
from ddtree.train.group import Group
from ddtree.train.heads_job import HeadsJob
from ddtree.train.objective import LOSSES, Vocabulary
from ddtree.train.reporting import run_fit
from ddtree.train.sharding import alone

# What each head learns by default. A head sees the path, so the target's distribution there is its label; Domino's
# published recipe takes the tokens that came.
_LOSS = {"domino": "ce"}
_DEFAULT_LOSS = "kl"
_SIZES = {
    "markov": ("size",),
    "treeflash": ("hidden_size",),
    "domino": ("hidden_size", "size"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
