"""`ddtree bench`: methods of decoding measured side by side; `ddtree bench report`: tables and pictures of results;
`ddtree bench serve`: drafting modes of a server compared."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.cli import options
from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.bench.methods import DecodingMethod, ModelPair

_FULL = {"budgets": [8, 16, 32, 64, 128, "auto"], "max_tokens": 128, "per_task": None}
_QUICK = {"budgets": [16, 64, "auto"], "max_tokens": 48, "per_task": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree bench` and its actions `report` and `serve`."""
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
                      help="transformers' generate beside them: hf, prompt-lookup or assisted; repeatable")  # fmt: skip
    what.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T",
                      help="default: 0 1")  # fmt: skip
    _add_prompt_options(what, messages=True)
    what.add_argument("--quick", action="store_true",
                      help="few prompts, budgets and tokens: a few minutes on two cores")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="results, as JSON lines; a run that was broken off goes on there "
                        "(default: bench-DATE.jsonl)")  # fmt: skip
    _add_report_options(parser)
    options.add_model_options(parser)
    parser.set_defaults(prompts=["small"], turns=1, seed=0)
    actions = parser.add_subparsers(dest="action", metavar="{report,serve}")
    # Defaults are suppressed in both: they would replace what is given before the action's name.
    absent: Any = {"argument_default": argparse.SUPPRESS}
    report = actions.add_parser("report", help="tables and pictures of results", **absent,
                                description="Print tables and draw pictures of results.")  # fmt: skip
    report.add_argument("raw", type=Path, help="written by ddtree bench")
    report.add_argument("--debug", action="store_true", help="show the traceback of an error")
    _add_report_options(report)
    serve = actions.add_parser("serve", help="compare drafting modes of an OpenAI-compatible server", **absent,
                               description="Compare drafting modes of an OpenAI-compatible server; they take turns, "
                               "block by block.")  # fmt: skip
    serve.add_argument("--debug", action="store_true", help="show the traceback of an error")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    serve.add_argument("--api-key", default=None, metavar="KEY")
    serve.add_argument(
        "--model", default=None, metavar="NAME", help="default: the first that the server names"
    )
    serve.add_argument("--drafting", default=None, nargs="+", metavar="MODE",
                       help="off, chain, tree, auto, each also with :BUDGET, /DEPTH and @DRAFTER; the first one is "
                       "the base (default: as the server is set)")  # fmt: skip
    serve.add_argument("--concurrency", type=int, default=1, metavar="N",
                       help="requests at once (default: 1)")  # fmt: skip
    serve.add_argument("-t", "--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    _add_prompt_options(serve)
    serve.add_argument("--out", type=Path, metavar="FILE", help="every answer and its times, as JSON")


def _add_prompt_options(group: argparse._ActionsContainer, messages: bool = False) -> None:
    """Add the prompts, and how often and how long they are answered; with most `messages` of a conversation."""
    group.add_argument("--prompts", nargs="+", metavar="SET",
                       help="small (40 of our own), a file of JSON lines {id, task, turns}, or of the hub: gsm8k, "
                       "math500, aime, humaneval, mbpp, livecodebench, swebench-lite, mtbench, alpaca "
                       "(default: small)")  # fmt: skip
    group.add_argument("--per-task", type=int, metavar="N", help="most prompts of a task")
    group.add_argument("--limit", type=int, metavar="N", help="most prompts in all")
    if messages:
        group.add_argument("--messages", type=int, metavar="N",
                           help="most user messages answered of a conversation (default: all)")  # fmt: skip
    group.add_argument("-n", "--max-tokens", type=int, metavar="N",
                       help="most tokens of an answer (default: 128)")  # fmt: skip
    group.add_argument("--turns", type=int, metavar="N",
                       help="how often everything is measured (default: 1)")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="default: 0")


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="put the tables into a document, in place of those of the same file")  # fmt: skip
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pictures (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure, report or load a server; return 1 where a text differs for no known reason or an answer failed."""
    options.replace_unencodable_output()
    if args.action == "serve":
        return _serve(args)
    if args.plots:
        from ddtree.bench import report

        report.check_matplotlib()
    if args.action == "report":
        _check_apart(args.raw, args.markdown)
        return _report(args.raw, args)
    return _measure(args)


def _measure(args: argparse.Namespace) -> int:
    from ddtree.bench import methods, prompt_sets, runner
    from ddtree.bench.results import ResultsFile, busy_warning

    _settle(args)
    prompts = prompt_sets.read(args.prompts, args.per_task, args.limit)
    pair = methods.ModelPair(options.load_model(args))
    names = args.cells or methods.default_methods(args.budgets, drafting=bool(pair.members))
    compared = pair.methods(names, args.baseline)
    chosen = {
        name: getattr(args, name) for name in ("temperatures", "turns", "messages", "max_tokens", "seed")
    }
    plan = runner.BenchPlan(prompts, max_context=pair.target.max_context, **chosen)
    if warning := busy_warning():
        print(f"ddtree: {warning}", file=sys.stderr)
    header = _header(args, pair, compared, prompt_sets.digest(prompts))
    with ResultsFile(args.out, header) as results:
        if results.done:
            print(f"ddtree: going on with {args.out}", file=sys.stderr)
        runner.BenchRunner(compared, plan, pair, results).run()
    return _report(args.out, args)


def _header(
    args: argparse.Namespace, pair: ModelPair, compared: list[DecodingMethod], digest: str
) -> dict[str, Any]:
    """Return the first line of the results: what was measured, on what, when and how."""
    from ddtree.bench.methods import BASELINES
    from ddtree.bench.results import describe_machine, versions

    return {
        "date": _now(),
        "command": shlex.join(["ddtree", *sys.argv[1:]]),
        "machine": describe_machine(pair.target.device),
        "versions": versions(),
        "acceptance_seen": {name: known.seen for name, known in pair.acceptance().items()},
        "settings": {
            "target": args.target,
            "drafter": "+".join(pair.members) or "none",
            "drafter_given": args.drafter or ["auto"],
            "device": str(pair.target.device),
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "max_context": pair.target.max_context,
            "cells": [method.name for method in compared if method.name not in BASELINES],
            "baselines": [method.name for method in compared if method.name in BASELINES],
            "temperatures": args.temperatures,
            "prompts": args.prompts,
            "prompts_digest": digest,
            **{name: getattr(args, name) for name in ("max_tokens", "turns", "messages", "seed")},
        },
    }


def _report(path: Path, args: argparse.Namespace) -> int:
    """Print the tables, and write what was asked for; return 1 where a text differs for no known reason."""
    from ddtree.bench import report, results

    found = results.read(path)
    print(report.terminal(found))
    drawn = report.draw(found, args.plots) if args.plots else []
    if args.markdown:
        report.write(args.markdown, path, found, drawn)
    if args.action != "report":
        print(f"\nraw figures: {path}")
    baselines = found.settings["baselines"]
    wrong = [r for r in found.runs if r["verdict"]["kind"] == "different" and r["cell"] not in baselines]
    return 1 if wrong else 0


def _serve(args: argparse.Namespace) -> int:
    """Compare drafting modes of a server; return 1 where an answer failed."""
    from ddtree.bench import load, prompt_sets

    most = 128 if args.max_tokens is None else args.max_tokens
    fields = {"max_tokens": most, "temperature": args.temperature, "seed": args.seed}
    prompts = prompt_sets.read(args.prompts, args.per_task, args.limit)
    modes = tuple(dict.fromkeys(args.drafting or [load.AS_SERVED]))
    plan = load.LoadPlan(prompts, modes, args.concurrency, args.turns, fields)
    about = {"url": args.url, "date": _now(), "concurrency": args.concurrency, **fields}
    _write_json(args.out, about)  # a file that cannot be written is told before anything is measured
    model, replies = asyncio.run(load.measure(args.url, plan, args.api_key, args.model))
    about = {"model": model, **about}
    _write_json(args.out, {**about, "answers": [asdict(reply) for reply in replies]})
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"\n{load.load_table(replies).text()}")
    errors = list(dict.fromkeys(reply.error for reply in replies if reply.error))
    for error in errors:
        print(f"failed: {error}")
    return 1 if errors else 0


def _write_json(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        try:
            path.write_text(json.dumps(value) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--out {path} cannot be written ({error.strerror}): name another file"
            ) from error


def _settle(args: argparse.Namespace) -> None:
    """Fill in what was not given, and raise ConfigError for what cannot be."""
    from ddtree.sampling.params import SamplingParams

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
    args.out = args.out or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}.jsonl")
    _check_apart(args.out, args.markdown)


def _check_apart(raw: Path, markdown: Path | None) -> None:
    if markdown is not None and markdown.resolve() == raw.resolve():
        raise ConfigError(f"--markdown {markdown} is the file of raw figures: name another file")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
