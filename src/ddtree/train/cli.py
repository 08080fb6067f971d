"""`ddtree train`: from a target to a drafter, in steps that can each be stopped and taken up again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ddtree.drafters import Drafter
from ddtree.drafters.backbone import Backbone
from ddtree.drafters.checkpoint import read
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.lookup import Lookup
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngrams import NgramTable
from ddtree.pretrained import load_causal_lm
from ddtree.progress import ProgressLine
from ddtree.target import Target
from ddtree.train import export as exporting
from ddtree.train import fitting
from ddtree.train import synthesize as synthesizing
from ddtree.train.data import Corpus, Example, make_example, read_shard, shard_indices, teacher_pass
from ddtree.train.evaluate import replay
from ddtree.train.export import DRAFTER, EVALUATION, NGRAMS, Figure
from ddtree.train.group import Group, local_device
from ddtree.train.initial import feature_layers

STEPS = ("synthesize", "features", "fit", "evaluate", "export")
_APART = {"features"}  # steps that "all" leaves out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ddtree train`."""
    parser.add_argument(
        "step", nargs="?", choices=("all", *STEPS), default="all", help="one step, or all of them"
    )
    parser.add_argument("--target", default="demo", help="checkpoint folder or hub id (default: demo)")
    parser.add_argument("--work", type=Path, default=Path("ddtree-train"), help="folder for data and state")
    parser.add_argument("--out", type=Path, help="folder of the finished drafter (default: WORK/export)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cuda, mps or cpu (default: cpu)")
    parser.add_argument("--dtype", help="of the target: bfloat16 or float32 (default: the checkpoint's own)")
    synthesizing.add_arguments(parser)
    fitting.add_arguments(parser)
    group = parser.add_argument_group("evaluate")
    group.add_argument("--answers", type=Path, help="a shard to evaluate on beside the held-out answers")
    group.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32], help="default: 8 16 32")
    group.add_argument(
        "--limit", type=int, default=200, help="most conversations of a set (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the step or steps asked for. Errors a user can cause are `DDTreeError`s."""
    steps = [step for step in STEPS if step not in _APART] if args.step == "all" else [args.step]
    target = None if steps == ["export"] else _target(args)
    group = Group.join(torch.device(args.device) if target is None else target.device)
    try:
        for step in steps:
            if step in ("fit", "features") or group.main:
                _step(step, args, target, group)
            group.wait()
    finally:
        group.leave()
    return 0


def _target(args: argparse.Namespace) -> Target:
    return Target(*load_causal_lm(args.target, local_device(args.device), args.dtype))


def _step(step: str, args: argparse.Namespace, target: Target | None, group: Group) -> None:
    if step == "export":
        out = args.out or args.work / "export"
        exporting.export(args.work, out)
        print(f"the drafter is in {out}")
        return
    assert target is not None
    if step == "synthesize":
        synthesize(args, target)
    elif step == "features":
        features(args, target)
    elif step == "fit":
        fitting.fit(args, target, group)
    else:
        evaluate(args, target)


def synthesize(args: argparse.Namespace, target: Target) -> None:
    synthesizer = synthesizing.synthesizer_of(args, target, args.work / "answers")
    line = ProgressLine("synthesize", args.tokens, "answer tokens")
    held = synthesizer.run(line.update)
    line.close()
    print(held)


def features(args: argparse.Namespace, target: Target) -> None:
    """Compute the features of all answers once, and keep them."""
    corpus = Corpus(args.work / "answers")
    line = ProgressLine("features", len(shard_indices(corpus.folder)), "shards")
    corpus.prepare(target, feature_layers(target, args.draft_layers), line.update)
    line.close()


def evaluate(args: argparse.Namespace, target: Target) -> None:
    """Replay the drafter, the table and both together along held-out answers."""
    corpus = Corpus(args.work / "answers")
    layers = feature_layers(target, args.draft_layers)
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
                figures += measure(name, chosen, drafters(args.work, target), args.budgets, target.dtype)
    exporting.write_json(args.work / EVALUATION, [asdict(figure) for figure in figures])


def drafters(work: Path, target: Target) -> dict[str, Callable[[], Drafter]]:
    """Makers of what there is to measure: each replay needs a drafter without rows."""
    checkpoint = read(work / DRAFTER)

    def dflash() -> Drafter:
        backbone = Backbone(checkpoint.network(), target, draft_ids=checkpoint.draft_ids)
        return DFlash(backbone, coupling=checkpoint.layout.coupling)

    makers: dict[str, Callable[[], Drafter]] = {"dflash": dflash}
    if not (work / NGRAMS).exists():
        return makers
    table = NgramTable.load(work / NGRAMS)

    def lookup() -> Drafter:
        return Lookup(table, vocab_size=target.vocab_size, device=target.device)

    return makers | {"n-grams": lookup, "dflash + n-grams": lambda: Merged([dflash(), lookup()])}


def measure(
    name: str,
    examples: list[Example],
    makers: dict[str, Callable[[], Drafter]],
    budgets: list[int],
    dtype: torch.dtype,
) -> list[Figure]:
    """Tokens per round of each drafter at each budget, printed as they come."""
    figures = []
    for drafter, make in makers.items():
        tau = {"chain": replay(make(), examples, make().max_depth, chain=True, dtype=dtype).tau}
        for budget in budgets:
            tau[f"B={budget}"] = replay(make(), examples, budget, dtype=dtype).tau
        figures.append(Figure(name, len(examples), drafter, 0 if examples[0].greedy else 1, tau))
        cells = ", ".join(f"{key} {value:.2f}" for key, value in tau.items())
        print(f"{name}, T={figures[-1].temperature}, {drafter}: {cells}", flush=True)
    return figures
