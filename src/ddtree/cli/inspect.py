"""`ddtree inspect`: what a checkpoint or a pair is. Exit code 1 where a pair does not fit."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default="demo", help="a target or a drafter: demo, a folder, a hub id, draft:MODEL"
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--target", metavar="NAME", help="the target, when the first is a drafter")
    other.add_argument("--drafter", metavar="NAME", help="the drafter, when the first is a target")


def run(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from ddtree.inspect import inspect

    if not args.debug:
        logging.set_verbosity_error()
    report = inspect(args.name, target=args.target, drafter=args.drafter)
    print(report)
    return 1 if report.misfits else 0
