"""`ddtree bench`: ways of decoding measured side by side; `ddtree bench report`: tables and pictures of raw figures;
`ddtree bench serve`: a server under load."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from ddtree.cli import bench_serve, options
from ddtree.errors import ConfigError

_FULL = {"budgets": [8, 16, 32, 64, 128, "auto"], "max_tokens": 128, "per_task": None}
_QUICK = {"budgets": [16, 64, "auto"], "max_tokens": 48, "per_task": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure ways of decoding side by side on one pair, check that the texts are the same, print tables."
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--cells", nargs="+", metavar="CELL",
                      help="off, chain, tree:N, tree:auto, auto, each also with @DRAFTER[+DRAFTER] and +uncoupled "
                      "(default: off, chain, a tree of each budget, auto)")  # fmt: skip
    what.add_argument("--budgets", nargs="+", type=options.budget, metavar="N",
                      help="trees where no cells are named (default: 8 16 32 64 128 auto)")  # fmt: skip
    what.add_argument("--baseline", action="append", default=[], metavar="NAME",
                      help="transformers' own generate beside them: hf, prompt-lookup or assisted; "
                      "repeatable")  # fmt: skip
    what.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T",
                      help="default: 0 1")  # fmt: skip
    what.add_argument("--prompts", nargs="+", default=["small"], metavar="SET",
                      help="small (40 of our own), a file of JSON lines {id, task, turns}, or of the hub: gsm8k, "
                      "math500, aime, humaneval, mbpp, livecodebench, swebench-lite, mtbench, alpaca "
                      "(default: small)")  # fmt: skip
    what.add_argument("--per-task", type=int, metavar="N", help="most prompts of a task")
    what.add_argument("--limit", type=int, metavar="N", help="most prompts in all")
    what.add_argument("--messages", type=int, metavar="N",
                      help="most user messages answered of a conversation (default: all)")  # fmt: skip
    what.add_argument(
        "-n", "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: 128)"
    )
    what.add_argument("--turns", type=int, default=1, metavar="N",
                      help="how often everything is measured (default: 1)")  # fmt: skip
    what.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    what.add_argument("--quick", action="store_true",
                      help="few prompts, budgets and tokens: a few minutes on two cores")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="raw figures, as JSON lines; a run that was broken off goes on there "
                        "(default: bench-DATE.jsonl)")  # fmt: skip
    _add_report_options(parser)
    options.add_model_options(parser)
    actions = parser.add_subparsers(dest="action", metavar="{report,serve}")
    report = actions.add_parser(
        "report", help="tables and pictures of raw figures", description="Tables and pictures of raw figures."
    )
    report.add_argument("raw", type=Path, help="written by ddtree bench")
    # What stands before "report" shall not be forgotten.
    report.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                        help="show the traceback of an error")  # fmt: skip
    _add_report_options(report, default=argparse.SUPPRESS)
    serve = actions.add_parser("serve", help="measure an OpenAI-compatible server under load")
    serve.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                       help="show the traceback of an error")  # fmt: skip
    bench_serve.add_arguments(serve)


def run(args: argparse.Namespace) -> int:
    options.forgiving_output()
    if args.action == "serve":
        return bench_serve.run(args)
    if args.plots:
        from ddtree.bench import report as plots

        plots.check()
    if args.action == "report":
        _apart(args.raw, args.markdown)
        return _report(args.raw, args)
    return _measure(args)


def _add_report_options(parser: argparse.ArgumentParser, default: Any = None) -> None:
    parser.add_argument("--markdown", type=Path, metavar="FILE", default=default,
                        help="put the tables into a document, in place of those made of the same file "
                        "before")  # fmt: skip
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", default=default, help="draw pictures (needs matplotlib)"
    )


def _measure(args: argparse.Namespace) -> int:
    from ddtree.bench import methods as cells
    from ddtree.bench import prompt_sets as prompts
    from ddtree.bench import results as raw
    from ddtree.bench import runner as machine
    from ddtree.bench.methods import Baseline, Lane, Pair
    from ddtree.bench.runner import Plan, Runner, judge
    from ddtree.cli.side_by_side import busy

    _settle(args)
    chosen = prompts.read(args.prompts, args.per_task, args.limit)
    pair = Pair(options.load_model(args))
    names = args.cells or cells.usual(args.budgets, drafting=bool(pair.members))
    ways = pair.ways(names, args.baseline)
    header = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["ddtree", *sys.argv[1:]]),
        "machine": machine.describe(pair.target.device),
        "versions": machine.versions(),
        "acceptance_seen": {name: known.seen for name, known in pair.acceptance().items()},
        "settings": {
            "target": args.target,
            "drafter": "+".join(pair.members) or "none",
            "drafter_given": args.drafter or ["auto"],
            "device": str(pair.target.device),
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "max_context": pair.target.max_context,
            "cells": [way.name for way in ways if isinstance(way, Lane)],
            "baselines": [way.name for way in ways if isinstance(way, Baseline)],
            "temperatures": args.temperatures,
            "prompts": [str(name) for name in args.prompts],
            "prompts_digest": prompts.digest(chosen),
            "max_tokens": args.max_tokens,
            "turns": args.turns,
            "messages": args.messages,
            "seed": args.seed,
        },
    }
    plan = Plan(
        chosen,
        args.temperatures,
        args.turns,
        args.messages,
        args.max_tokens,
        pair.target.max_context,
        args.seed,
    )
    if warning := busy():
        print(f"ddtree: {warning}", file=sys.stderr)
    with raw.Log(args.out, header) as log:
        if log.done:
            print(f"ddtree: going on with {args.out}", file=sys.stderr)
        runner = Runner(
            ways, plan, encode=pair.encode, decode=pair.decode, log=log,
            judge=lambda *given: judge(pair.target, *given),
        )  # fmt: skip
        runner.run()
    return _report(args.out, args)


def _report(path: Path, args: argparse.Namespace) -> int:
    """Print the tables, and write what was asked for; 1 where a text differs for no known reason."""
    from ddtree.bench import report as document
    from ddtree.bench import report as plots
    from ddtree.bench import results as raw

    found = raw.read(path)
    print(document.terminal(found))
    drawn = plots.draw(found, args.plots) if args.plots else []
    if args.markdown:
        document.write(args.markdown, path, found, drawn)
    if args.action != "report":
        print(f"\nraw figures: {path}")
    baselines = found.settings["baselines"]
    wrong = [r for r in found.runs if r["verdict"]["kind"] == "different" and r["cell"] not in baselines]
    return 1 if wrong else 0


def _settle(args: argparse.Namespace) -> None:
    """Fill in what was not given, and refuse what cannot be."""
    from ddtree.sampling.sampler import SamplingParams

    for name, usual in (_QUICK if args.quick else _FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, usual)
    for name in ("max_tokens", "turns", "messages"):
        value: Any = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    for temperature in args.temperatures:
        if not 0 <= temperature < float("inf"):
            raise ConfigError(f"--temperatures {temperature:g} is not a number from 0 up")
        SamplingParams(temperature=temperature, max_tokens=args.max_tokens)
    args.temperatures = list(dict.fromkeys(args.temperatures))
    if args.out is None:
        args.out = Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}.jsonl")
    _apart(args.out, args.markdown)


def _apart(raw: Path, markdown: Path | None) -> None:
    if markdown is not None and markdown.resolve() == raw.resolve():
        raise ConfigError(f"--markdown {markdown} is the file of raw figures: name another file")
