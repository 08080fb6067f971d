"""`ddtree inspect`: what a checkpoint or a pair is. Exit code 1 where a pair does not fit, or vLLM does not."""

from __future__ import annotations

import argparse

from ddtree.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree inspect`."""
    parser.add_argument("name", nargs="?", default="demo",
                        help="a target or a drafter: demo, a folder, a hub id, draft:MODEL")  # fmt: skip
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--target", metavar="NAME", help="the target, when the first is a drafter")
    other.add_argument("--drafter", metavar="NAME", help="the drafter, when the first is a target")
    other.add_argument("--vllm", action="store_true",
                       help="whether draft trees can run in the vLLM that is installed")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 where a pair does not fit, or draft trees cannot run in vLLM."""
    if args.vllm:
        return _vllm()
    from ddtree.inspection import inspect

    options.quiet_transformers(args.debug)
    report = inspect(args.name, target=args.target, drafter=args.drafter)
    print(report)
    return 1 if report.incompatibilities else 0


def _vllm() -> int:
    from ddtree.integrations.vllm.validate import report

    lines = report()
    print(*lines, sep="\n")
    wrong = sum(line.wrong is not None for line in lines)
    verdict = f"draft trees cannot run in it: {wrong} of {len(lines)} differ"
    print(verdict if wrong else "draft trees can run in it")
    return 1 if wrong else 0
