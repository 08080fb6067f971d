"""`ddtree demo`: the same prompts answered one token at a time and with draft trees."""

from __future__ import annotations

import argparse

from ddtree.cli.options import budget


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="prompts (default: three of its own)")
    parser.add_argument("--target", default="demo", metavar="NAME", help="default: demo")
    parser.add_argument("--drafter", default="auto", metavar="NAME", help="default: auto")
    parser.add_argument("--budget", type=budget, default="auto", metavar="N",
                        help="default: auto, as many nodes as pay on this machine")  # fmt: skip
    parser.add_argument("-n", "--max-tokens", type=int, default=96, metavar="N", help="default: 96")
    parser.add_argument("-t", "--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--device", help="cuda, mps or cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                        help="default: the checkpoint's own")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from ddtree.cli.side_by_side import PROMPTS, run_demo

    if not args.debug:
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    return run_demo(
        target=args.target,
        drafter=args.drafter,
        prompts=tuple(args.prompt) or PROMPTS,
        budget=args.budget,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        dtype=args.dtype,
        device=args.device,
    )
