"""`ddtree train`: from a target to a drafter, in steps that can each be stopped and taken up again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ddtree.errors import ConfigError
from ddtree.model.pretrained import choose_device, load_causal_lm
from ddtree.model.target import Target
from ddtree.train import steps, work_folder
from ddtree.train.arguments import TrainConfig, add_options
from ddtree.train.distributed import Group, local_device, wants_fsdp
from ddtree.train.evaluate import EvaluationOptions
from ddtree.train.synthesize import SynthesisConfig

_STEPS: dict[str, Callable[..., None]] = {
    "synthesize": steps.synthesize,
    "features": steps.features,
    "fit": steps.fit,
    "heads": steps.heads,
    "evaluate": steps.evaluate,
    "export": steps.export,
    "plot": steps.plot,
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
    add_options(group, steps.DrafterOptions)
    group = parser.add_argument_group("heads", "options of `fit` that are not named here hold for both")
    add_options(group, steps.HeadOptions)
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
