"""Speed inside vLLM: plain, with its own n-gram drafts, and with ours, in turns.

    .venv-vllm/bin/python benchmarks/vllm_speed.py --dtype float32 --turns 3

Every way has an engine in a process of its own. All stay loaded, and one is asked at a time: in each turn every way
answers the same prompts, in another order each turn, once for each number of streams: twice as many prompts as streams,
the next one when one is answered. Steps count that decode so many streams and read no prompt: with drafts some answers
are done long before others, and the last ones alone say little of the load. Texts are compared with plain vLLM's. In
float32 the exit code is 1 where one differs; in bfloat16, where vLLM itself rounds a near-tie in another way as the
batch has another shape, the number of those that differ is shown.

Of a step, `model` is the time in the target's forward pass and head, `draft` that in our drafters, and `other` what is
left: the engine's own work, and ours. Our share is `other` less that of plain vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from vllm_engine import WAYS

from ddtree.bench import prompt_sets
from ddtree.model.demo import resolve
from ddtree.model.pretrained import read_tokenizer

PLAIN = next(iter(WAYS))
EACH = 2  # prompts of a turn, for each stream


class Child:
    """An engine's process, asked over pipes."""

    def __init__(self, way: str, log: Path, setup: dict[str, Any]) -> None:
        self.log = log.open("w")
        script = Path(__file__).with_name("vllm_engine.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**environment(), **os.environ},
        )  # fmt: skip
        self.way = way
        self.ask({"way": way, **setup})

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        """Send a line and return the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine of {self.way!r} ended: see {self.log.name}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.log.close()


def environment() -> dict[str, str]:
    """Return the environment that `ddtree serve --engine vllm` sets, with the engine in the process that times it."""
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    library = Path(sys.prefix, "lib", "libiomp5.so")
    return found | ({"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "5"} if library.exists() else {})


def chats(model: str, count: int, skip: int) -> list[str]:
    """Return prompts of the set that ships, through the model's chat template."""
    tokenizer = read_tokenizer(model)
    chosen = prompt_sets.read([prompt_sets.SMALL], limit=skip + count)[skip:]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.turns[0]}], tokenize=False, add_generation_prompt=True
        )
        for prompt in chosen
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="compiled models; loading takes minutes")
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder for what the engines print")
    parser.add_argument("--out", type=Path, help="file for the raw figures")
    args = parser.parse_args()
    ways = [PLAIN, *(way for way in args.ways if way != PLAIN)]
    setup = {
        "model": resolve(args.target),
        "arguments": {
            "dtype": args.dtype, "enforce_eager": not args.compile, "max_model_len": 1024, "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**28, "enable_prefix_caching": False,
        },
    }  # fmt: skip
    args.logs.mkdir(parents=True, exist_ok=True)
    children = {}
    try:
        for way in ways:
            log = args.logs / f"vllm_speed-{len(children)}.log"
            children[way] = Child(way, log, setup)
        raw = run(children, args, setup["model"])
    finally:
        for child in children.values():
            child.close()
    if args.out:
        args.out.write_text(json.dumps({"arguments": vars(args), "figures": raw}, default=str))
    differ = show(raw, ways)
    return int(differ > 0 and args.dtype == "float32")


def run(children: dict[str, Child], args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Ask every way in turns; return the figures of every answer with its turn, streams and way."""
    found, skip = [], 0
    for child in children.values():
        child.ask({"prompts": chats(model, 1, 0), "tokens": 16, "streams": 1})
    for turn in range(args.turns):
        for streams in args.streams:
            texts = chats(model, EACH * streams, skip)
            skip += EACH * streams
            order = list(children)
            for way in order[turn % len(order) :] + order[: turn % len(order)]:
                figures = children[way].ask({"prompts": texts, "tokens": args.tokens, "streams": streams})
                found.append({"turn": turn, "streams": streams, "way": way, **figures})
                print(f"turn {turn}, {streams} streams, {way}", file=sys.stderr)
    return found


def show(raw: list[dict[str, Any]], ways: list[str]) -> int:
    """Print the tables; return how many texts differ from plain vLLM's."""
    cells: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for figures in raw:
        cells[figures["streams"], figures["way"]].append(figures)
    differ = 0
    for streams in sorted({streams for streams, _ in cells}):
        print(f"\n{streams} streams: tokens a second, median (range); ratio to plain, median over turns")
        plain = cells[streams, PLAIN]
        for way in ways:
            own = cells[streams, way]
            rates = [figures["generated"] / figures["seconds"] for figures in own]
            ratios = [
                rate * base["seconds"] / base["generated"] for rate, base in zip(rates, plain, strict=True)
            ]
            pairs = [
                (text, other)
                for figures, base in zip(own, plain, strict=True)
                for text, other in zip(figures["tokens"], base["tokens"], strict=True)
            ]
            same = sum(text == other for text, other in pairs)
            differ += len(pairs) - same
            steps = sum(figures["steps"] for figures in own)
            took, model, draft = (
                sum(figures[part] for figures in own) for part in ("seconds", "model", "draft")
            )
            per_step = sum(figures["generated"] for figures in own) / steps / streams
            print(
                f"  {way:<14} {statistics.median(rates):7.1f} ({min(rates):.1f}..{max(rates):.1f})"
                f"  x{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
                f"  {per_step:.2f} tokens a step and stream; {same} of {len(pairs)} texts identical"
            )
            print(
                f"  {'':<14} step {took / steps * 1000:.1f} ms: model {model / took:.1%}, draft {draft / took:.1%}, "
                f"other {(took - model - draft) / took:.1%} ({(took - model - draft) / steps * 1000:.2f} ms)"
            )
    return differ


if __name__ == "__main__":
    sys.exit(main())
