"""`ddtree train`: from a target to a drafter, in steps that can each be stopped and taken up again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ddtree.model.pretrained import choose_device, load_causal_lm
from ddtree.model.target import Target
from ddtree.progress import ProgressLine
from ddtree.train import export as exporting
from ddtree.train import steps as jobs
from ddtree.train import synthesize as synthesizing
from ddtree.train.data import Corpus
from ddtree.train.distributed import Group, fsdp_asked, local_device
from ddtree.train.export import plot
from ddtree.train.fsdp import alone, shard_target
from ddtree.train.initial import feature_layers

STEPS = ("synthesize", "features", "fit", "heads", "evaluate", "export", "plot")
_WITHOUT_TARGET = {"export", "plot"}
_TOGETHER = {"fit", "heads"}  # steps that several processes share


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
    parser.add_argument(
        "--fsdp",
        action="store_true",
        help="shard the target, and in `fit` the drafter and its optimizer, over the processes of torchrun or "
        "accelerate launch",
    )
    synthesizing.add_arguments(parser)
    jobs.add_arguments(parser)
    jobs.add_head_arguments(parser)
    jobs.add_figure_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the step or steps asked for. Errors a user can cause are `DDTreeError`s."""
    steps = [args.step]
    if args.step == "all":
        apart = {"features", "plot"} if args.heads else {"features", "heads", "plot"}
        steps = [step for step in STEPS if step not in apart]
    device = choose_device(local_device(args.device))
    sharded = fsdp_asked(args.fsdp, device)
    loaded = None
    if not set(steps) <= _WITHOUT_TARGET:
        # Before the processes meet: afterwards transformers may let the first of them alone load.
        loaded = load_causal_lm(args.target, "cpu" if sharded else device, args.dtype)
    group = Group.join(device, sharded)
    try:
        target = _target(*loaded, device, sharded) if loaded else None
        for step in steps:
            if step in _TOGETHER:
                _step(step, args, target, group)
            else:
                with alone(group, target) as main:
                    if main:
                        _step(step, args, target, group)
            group.wait()
    finally:
        group.leave()
    return 0


def _target(model: Any, tokenizer: Any, device: torch.device, sharded: bool) -> Target:
    if sharded:
        shard_target(model, device)
    return Target(model, tokenizer, graphs=not sharded)


def _step(step: str, args: argparse.Namespace, target: Target | None, group: Group) -> None:
    if step == "export":
        out = args.out or args.work / "export"
        exporting.export(args.work, out)
        print(f"the drafter is in {out}")
        return
    if step == "plot":
        print(*plot(args.work), sep="\n")
        return
    assert target is not None
    if step == "synthesize":
        synthesize(args, target)
    elif step == "features":
        corpus = Corpus(args.work / "answers")
        jobs.store_features(corpus, target, feature_layers(target, args.draft_layers))
    elif step == "fit":
        jobs.fit(args, target, group)
    elif step == "heads":
        jobs.fit_heads(args, target, group)
    else:
        jobs.evaluate(args, target)


def synthesize(args: argparse.Namespace, target: Target) -> None:
    synthesizer = synthesizing.synthesizer_of(args, target, args.work / "answers")
    line = ProgressLine("synthesize", args.tokens, "answer tokens")
    held = synthesizer.run(line.update)
    line.close()
    print(held)
