"""`ddtree bench serve`: a server under load, ways of drafting compared in one run."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddtree
from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.bench.prompt_sets import BenchPrompt
    from ddtree.bench.serving.endpoint import Endpoint
    from ddtree.bench.serving.jobs import Plan
    from ddtree.bench.serving.runner import Block


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Names that `ddtree bench` has as well: what stands before "serve" shall not be forgotten.
    shared: Any = {"default": argparse.SUPPRESS}
    parser.description = (
        "Send requests to an OpenAI-compatible server and measure how soon the answers come. Ways of drafting take "
        "turns, block by block, so that they are compared in one run."
    )
    where = parser.add_argument_group("server")
    where.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    where.add_argument("--api-key", metavar="KEY")
    where.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    where.add_argument("--endpoint", choices=("chat", "completions"), default="chat",
                       help="default: chat; completions get the first message as it is")  # fmt: skip
    where.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS",
                       help="without a word, after which an answer has failed (default: 600)")  # fmt: skip
    _add_load(parser.add_argument_group("load"), shared)
    asked = parser.add_argument_group("requests")
    asked.add_argument(
        "--prompts", nargs="+", metavar="SET", help="as of ddtree bench (default: small)", **shared
    )
    asked.add_argument("--per-task", type=int, metavar="N", help="most prompts of a task", **shared)
    asked.add_argument("--limit", type=int, metavar="N", help="most prompts in all", **shared)
    asked.add_argument("--messages", type=int, metavar="N",
                       help="most user messages of a conversation (default: all)", **shared)  # fmt: skip
    asked.add_argument("-n", "--max-tokens", type=int, metavar="N",
                       help="most tokens of an answer (default: 128)", **shared)  # fmt: skip
    asked.add_argument("-t", "--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    asked.add_argument("--ignore-eos", action="store_true", help="answers of --max-tokens tokens in any case")
    asked.add_argument("--fresh", action="store_true",
                       help="begin each conversation with words of its own, so that no prefix cache knows it; texts "
                       "are not compared then")  # fmt: skip
    asked.add_argument("--extra", type=json.loads, default={}, metavar="JSON",
                       help='more fields of each request, as {"top_p": 0.9}')  # fmt: skip
    asked.add_argument("--seed", type=int, metavar="N", help="of arrivals and answers (default: 0)", **shared)
    shown = parser.add_argument_group("figures")
    shown.add_argument("--ttft-limit", type=float, metavar="MS",
                       help="goodput counts answers whose first token comes within this")  # fmt: skip
    shown.add_argument("--tpot-limit", type=float, metavar="MS",
                       help="goodput counts answers that take no longer a token after the first")  # fmt: skip
    shown.add_argument("--percentiles", action="store_true", help="print all of them, not in --out alone")
    shown.add_argument("--out", type=Path, metavar="FILE", help="figures and raw times as JSON", **shared)


def _add_load(group: argparse._ArgumentGroup, shared: dict[str, Any]) -> None:
    group.add_argument("--concurrency", nargs="+", type=int, metavar="N",
                       help="closed loop: so many conversations at once, one after another (default: 1)")  # fmt: skip
    group.add_argument("--rate", nargs="+", type=float, metavar="R",
                       help="open loop: conversations begin as a Poisson process, R a second")  # fmt: skip
    group.add_argument("--drafting", nargs="+", metavar="WAY",
                       help="ways of drafting to compare, the first one being the base: off, chain, tree, auto, each "
                       "also with :BUDGET, /DEPTH and @DRAFTER (default: as the server is set)")  # fmt: skip
    group.add_argument("--requests", type=int, metavar="N",
                       help="conversations of each load, way and turn (default: each prompt once, and at least 4 for "
                       "each at once)")  # fmt: skip
    group.add_argument("--block", type=int, metavar="N",
                       help="conversations after which the next way has its turn (default: 1 where one is asked at a "
                       "time, all at a rate, else 4 for each at once)")  # fmt: skip
    group.add_argument("--turns", type=int, metavar="N",
                       help="how often everything is measured (default: 1)", **shared)  # fmt: skip
    group.add_argument("--history", type=int, metavar="N",
                       help="measure instead how soon a chat's second turn begins after a first message of N tokens, "
                       "where the server knows the chat and where it does not, in --turns chats")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where an answer failed."""
    from ddtree.bench import prompt_sets as prompts

    if args.history is not None and args.history < 1:
        raise ConfigError(f"--history {args.history} must be at least 1")
    if not isinstance(args.extra, dict):
        raise ConfigError('--extra must be an object, as {"top_p": 0.9}')
    chosen = prompts.read(args.prompts, args.per_task, args.limit)
    return asyncio.run(_run(args, chosen))


async def _run(args: argparse.Namespace, prompts: list[BenchPrompt]) -> int:
    from ddtree.bench.serving import report
    from ddtree.bench.serving.endpoint import Endpoint

    plan = _plan(args, prompts)
    if args.out is not None:
        report.write(args.out, {})
    async with Endpoint(
        args.url, key=args.api_key, model=args.model, chat=args.endpoint == "chat", timeout=args.timeout
    ) as endpoint:
        await endpoint.find()
        header = {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(["ddtree", *_without_key(sys.argv[1:])]),
            "server": {"url": endpoint.url, "model": endpoint.model, "version": await endpoint.version()},
            "client": {"ddtree": ddtree.__version__},
            "max_tokens": plan.fields["max_tokens"],
            "prompts": [prompt.id for prompt in prompts],
        }
        if args.history is not None:
            return await _measure_history(args, endpoint, plan, header)
        return await _measure_load(args, endpoint, plan, header)


async def _measure_load(
    args: argparse.Namespace, endpoint: Endpoint, plan: Plan, header: dict[str, Any]
) -> int:
    from ddtree.bench.serving import report, runner
    from ddtree.bench.serving.figures import Limits
    from ddtree.progress import ProgressLine

    blocks: list[Block] = []
    progress = ProgressLine("requests", sum(len(step.prompts) for step in plan.steps()), "conversations")
    limits = Limits(*(None if ms is None else ms / 1000 for ms in (args.ttft_limit, args.tpot_limit)))

    def done(block: Block) -> None:
        blocks.append(block)
        progress.update(
            sum(len(one.step.prompts) for one in blocks), f"{block.step.load}, {block.step.setting.name}"
        )

    await runner.warm_up(endpoint, plan)
    try:
        await runner.run(endpoint, plan, done)
    finally:
        progress.close()
        # What has been measured when a run is broken off is kept.
        found = report.Report(blocks, limits, comparable=not args.fresh)
        if args.out is not None:
            report.write(args.out, {**header, **found.record()})
    print(f"{endpoint.model} at {endpoint.url}, {header['date']}\n\n{found.text(args.percentiles)}")
    return 1 if any(not asked.answer.good for block in blocks for asked in block.asked) else 0


async def _measure_history(
    args: argparse.Namespace, endpoint: Endpoint, plan: Plan, header: dict[str, Any]
) -> int:
    from ddtree.bench.serving import history, report

    texts = [text for prompt in plan.prompts for text in prompt.turns]
    pairs = await history.measure(endpoint, texts, args.history, args.turns, plan.fields)
    if args.out is not None:
        report.write(args.out, {**header, "history": history.record(pairs)})
    print(history.table(pairs).text())
    return 0


def _plan(args: argparse.Namespace, prompts: list[BenchPrompt]) -> Plan:
    from ddtree.bench.serving.arrivals import Load
    from ddtree.bench.serving.jobs import Plan
    from ddtree.bench.serving.settings import AS_SERVED, Setting

    loads = [Load("concurrency", number) for number in args.concurrency or ([] if args.rate else [1])]
    loads += [Load("rate", rate) for rate in args.rate or []]
    max_tokens = 128 if args.max_tokens is None else args.max_tokens
    fields = {
        "max_tokens": max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        **({"ignore_eos": True} if args.ignore_eos else {}),
        **args.extra,
    }
    settings = [Setting.parse(name) for name in dict.fromkeys(args.drafting or [])] or [AS_SERVED]
    return Plan(
        prompts,
        list(dict.fromkeys(loads)),
        settings,
        turns=args.turns,
        requests=args.requests,
        block=args.block,
        messages=1 if args.endpoint == "completions" else args.messages,
        fresh=args.fresh,
        fields=fields,
        seed=args.seed,
    )


def _without_key(arguments: list[str]) -> list[str]:
    """The command as it may be published."""
    hidden = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == "--api-key":
            argument = "..."
        elif argument.startswith("--api-key="):
            argument = "--api-key=..."
        hidden.append(argument)
    return hidden
