"""The step `evaluate` of `ddtree train`: acceptance of everything that a work folder holds, along held-out answers."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ddtree.drafters import Drafter
from ddtree.drafters.checkpoint import read
from ddtree.drafters.d2sd import D2SD
from ddtree.drafters.dflash import backbone_of
from ddtree.drafters.loading import NGRAMS as TABLE_PART
from ddtree.drafters.loading import load_drafter
from ddtree.drafters.merged import Merged
from ddtree.target import Target
from ddtree.train.data import Corpus, Example, make_example, read_shard, teacher_pass
from ddtree.train.evaluate import replay
from ddtree.train.export import DRAFTER, EVALUATION, NGRAMS, SUMMARY, Figure, read_json, write_json
from ddtree.train.fit_heads import fitted_heads

_ROWS = {"cpu": 16}
_MANY_ROWS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
