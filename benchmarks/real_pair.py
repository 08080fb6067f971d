"""Drafted text against autoregressive text on a real pair, prompt by prompt, with every flip examined.

    python benchmarks/real_pair.py PROMPTS.jsonl --per-task 5 --dtype bfloat16 --out real_pair.jsonl

In float32 the two texts must be equal. In bfloat16 another shape of the forward may flip a near-tie of the target's own
arithmetic (`ddtree.flips`); every flip is listed, and one that is no near-tie fails the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import ddtree
from ddtree.engine import Engine, Sequence
from ddtree.flips import first_flip
from ddtree.sampling import SamplingParams


def run(model: Any, prompt: list[int], params: SamplingParams, **options: Any) -> Sequence:
    engine: Engine = model.engine
    sequence = engine.add(prompt, params, **options)
    while not engine.idle:
        engine.step()
    return sequence


def compare(target: Any, plain: Sequence, drafted: Sequence) -> dict[str, Any]:
    """Whether two runs gave the same text; else where they part, and whether that was a tie."""
    params = plain.params
    prompt = plain.tokens[: plain.prompt_length]
    flip = first_flip(target, prompt, plain.output, drafted.output, params.temperature, params.seed or 0)
    if flip is None:
        return {"equal": True}
    return {
        "equal": False,
        "near_tie": flip.near_tie,
        "at": flip.index,
        "gap": flip.gap,
        "noise": flip.noise,
        "tokens": flip.tokens,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: for each task the acceptance length and the speed against decoding one token at a time."""
    lines = [
        "| task | tau | tokens/s plain | tokens/s drafted | speedup |",
        "| --- | --- | --- | --- | --- |",
    ]
    for task in [*dict.fromkeys(row["task"] for row in rows), "all"]:
        mine = [row for row in rows if task in (row["task"], "all")]
        tau = statistics.mean(row["tau"] for row in mine)
        plain, drafted = (
            sum(row["tokens"] for row in mine) / sum(row[key] for row in mine)
            for key in ("plain_s", "drafted_s")
        )
        lines.append(f"| {task} | {tau:.2f} | {plain:.1f} | {drafted:.1f} | {drafted / plain:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--per-task", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    taken: dict[str, int] = {}
    prompts = []
    for line in args.prompts.read_text().splitlines():
        prompt = json.loads(line)
        taken[prompt["task"]] = taken.get(prompt["task"], 0) + 1
        if taken[prompt["task"]] <= args.per_task:
            prompts.append(prompt)
    model = ddtree.load(args.target, drafter=args.drafter, dtype=args.dtype)
    rows = []
    for temperature in args.temperatures:
        for number, prompt in enumerate(prompts):
            ids = model.encode([{"role": "user", "content": prompt["turns"][0]}])
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=args.max_tokens)
            plain = run(model, ids, params, method="off")
            drafted = run(model, ids, params, method="tree", budget=args.budget)
            verdict = compare(model.engine.target, plain, drafted)
            row = {"id": prompt["id"], "task": prompt["task"], "temperature": temperature, **verdict}
            row |= {"tau": drafted.stats.tau, "tokens": drafted.output_length}
            row |= {"plain_s": plain.stats.total, "drafted_s": drafted.stats.total}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for temperature in args.temperatures:
        mine = [row for row in rows if row["temperature"] == temperature]
        flips = [row for row in mine if not row["equal"]]
        wrong = [row for row in flips if not row["near_tie"]]
        tau = sum(row["tau"] for row in mine) / len(mine)
        print(
            f"T={temperature:g} {args.dtype}: {len(mine)} prompts, {len(mine) - len(flips)} identical, "
            f"{len(flips) - len(wrong)} near-tie flips, {len(wrong)} other differences, mean tau {tau:.2f}"
        )
        print(table(mine))
    failed = any(not row["equal"] and (args.dtype == "float32" or not row["near_tie"]) for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
