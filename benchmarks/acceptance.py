"""Acceptance of every drafting method along the same answers: tokens per round, draft time, coupled and not.

    python benchmarks/acceptance.py answers --prompts spec_bench.jsonl --per-task 2 --out answers.npz
    python benchmarks/acceptance.py replay --answers answers.npz --drafters demo/dflash demo/domino --out table.jsonl
    python benchmarks/acceptance.py table table.jsonl

The first step lets the target answer prompts, greedily and at temperature 1 with known seeds. The second replays each
drafter along the answers (what verification would accept does not depend on who drafted when the answer was made),
alone and, without n-grams of its own, merged with them. Cells already in the output file are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bench.prompt_sets import read
from ddtree.drafters import Drafter, parts_of
from ddtree.drafters.loading import load_drafter
from ddtree.engine.engine import Engine
from ddtree.model.pretrained import load_causal_lm
from ddtree.model.target import Target
from ddtree.prompts import encode
from ddtree.sampling.noise import PLAIN, Noise
from ddtree.sampling.params import SamplingParams
from ddtree.stats import Clock
from ddtree.train.data import Conversation, Example, make_examples, read_shard, write_shard
from ddtree.train.evaluate import replay

Sets = dict[float, list[tuple[int, Example]]]

TIMED = 3  # answers along which a single row is drafted for its time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="default: the checkpoint's own")
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("answers")
    step.add_argument("--prompts", type=Path, required=True)
    step.add_argument("--per-task", type=int, default=2)
    step.add_argument("--max-tokens", type=int, default=96)
    step.add_argument("--rows", type=int, default=8)
    step.add_argument("--out", type=Path, required=True)
    step = steps.add_parser("replay")
    step.add_argument("--answers", type=Path, nargs="+", required=True)
    step.add_argument("--drafters", nargs="+", required=True)
    step.add_argument("--lookup", default="demo/ngrams")
    step.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64])
    step.add_argument("--limit", type=int, default=36)
    step.add_argument("--rows", type=int, default=16)
    step.add_argument("--out", type=Path, required=True)
    step = steps.add_parser("table")
    step.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.step == "table":
        cells = [json.loads(line) for line in args.file.read_text().splitlines()]
        table(cells)
        gains(cells)
        return
    target = Target(*load_causal_lm(args.target, args.device, args.dtype))
    {"answers": answers, "replay": replays}[args.step](args, target)


def answers(args: argparse.Namespace, target: Target) -> None:
    """Let the target answer prompts; a sampled answer's seed is its place in the file."""
    prompts = read([str(args.prompts)], per_task=args.per_task)
    engine = Engine(target, None, max_rows=args.rows)
    wanted = []
    for temperature in (0.0, 1.0):
        for prompt in prompts:
            ids = encode(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            params = SamplingParams(temperature=temperature, seed=len(wanted), max_tokens=args.max_tokens)
            wanted.append((len(ids), engine.add(ids, params, method="off")))
    while not engine.idle:
        engine.step()
    made = [
        Conversation(np.array(sequence.tokens), start, place < len(prompts))
        for place, (start, sequence) in enumerate(wanted)
    ]
    write_shard(args.out, [], made)


def replays(args: argparse.Namespace, target: Target) -> None:
    """Measure every cell that the output file does not hold yet."""
    done = set()
    if args.out.exists():
        done = {_key(json.loads(line)) for line in args.out.read_text().splitlines()}
    every = [load_drafter(name, target) for name in args.drafters]
    layers = {drafter.feature_layers for drafter in every if drafter is not None and drafter.feature_layers}
    if len(layers) > 1:
        raise SystemExit(f"the drafters read features of different layers: {sorted(layers)}")
    for file in args.answers:
        sets = examples_of(file, target, *(layers or {()}), args.limit)
        for name, known in zip(args.drafters, every, strict=True):
            assert known is not None
            for merged in (False,) if "lookup" in known.name.split("+") else (False, True):
                spec: Any = [name, args.lookup] if merged else name
                for cell in _cells(args, file.stem, name, merged, sets):
                    if _key(cell) not in done:
                        _measure(cell, load_drafter(spec, target), sets, target, args)
                        with args.out.open("a") as out:
                            out.write(json.dumps(cell) + "\n")
                        print(json.dumps(cell), flush=True)


def _cells(
    args: argparse.Namespace, answers: str, name: str, merged: bool, sets: Sets
) -> Iterator[dict[str, Any]]:
    for temperature, examples in sets.items():
        # Answers whose seeds are not known cannot be drafted under their noise.
        seeded = bool(temperature) and answers != "demo_answers_eval"
        for coupled in (False, True) if seeded else (False,):
            for budget in ("chain", *args.budgets):
                yield {
                    "answers": answers,
                    "count": len(examples),
                    "drafter": name,
                    "merged": merged,
                    "temperature": temperature,
                    "coupled": coupled,
                    "budget": budget,
                }


def _measure(
    cell: dict[str, Any],
    drafter: Drafter | None,
    sets: Sets,
    target: Target,
    args: argparse.Namespace,
) -> None:
    assert drafter is not None
    if not cell["coupled"]:
        for part in parts_of(drafter):
            if hasattr(part, "coupling"):
                part.coupling = PLAIN
    chain = cell["budget"] == "chain"
    budget = drafter.max_depth if chain else cell["budget"]
    examples = [example for _, example in sets[cell["temperature"]]]
    seeds = {id(example): place for place, example in sets[cell["temperature"]]}

    def noise(example: Example) -> Noise:
        return Noise(seeds[id(example)], target.vocab_size, target.device)

    options: dict[str, Any] = {
        "chain": chain,
        "dtype": target.dtype,
        "noise": noise if cell["coupled"] else None,
    }
    result = replay(drafter, examples, budget, rows=args.rows, **options)
    clock = Clock()
    timed = replay(drafter, examples[:TIMED], budget, rows=1, clock=clock, **options)
    cell["tau"] = result.tau
    cell["rounds"] = result.rounds
    cell["tokens"] = result.tokens
    cell["each"] = result.each
    cell["draft_ms"] = 1e3 * (clock.seconds["draft"] + clock.seconds["build"]) / timed.rounds


def examples_of(file: Path, target: Target, layers: tuple[int, ...], limit: int) -> Sets:
    """The answers of a file with the target's features and their places in the file, by temperature."""
    prefix, conversations = read_shard(file)
    places = [
        place
        for greedy in (True, False)
        for place in [i for i, c in enumerate(conversations) if c.greedy == greedy][:limit]
    ]
    chosen = [conversations[place] for place in places]
    sets: Sets = {0.0: [], 1.0: []}
    for place, example in zip(places, make_examples(prefix, chosen, target, layers), strict=True):
        sets[float(not example.greedy)].append((place, example))
    return sets


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("answers", "drafter", "merged", "temperature", "coupled", "budget"))


def table(cells: list[dict[str, Any]]) -> None:
    """Markdown tables: tokens per round by drafter and budget, one for each set, temperature and coupling."""
    groups = list(dict.fromkeys((c["answers"], c["temperature"], c["coupled"]) for c in cells))
    for group in groups:
        own = [c for c in cells if (c["answers"], c["temperature"], c["coupled"]) == group]
        budgets = list(dict.fromkeys(c["budget"] for c in own))
        print(f"\n{group[0]}, n = {own[0]['count']}, T = {group[1]:g}{', coupled' if group[2] else ''}\n")
        print(
            "| drafter | "
            + " | ".join("chain" if b == "chain" else f"B={b}" for b in budgets)
            + " | draft ms, B=16 |"
        )
        print("| --- " * (len(budgets) + 2) + "|")
        for name, merged in dict.fromkeys((c["drafter"], c["merged"]) for c in own):
            found = {c["budget"]: c for c in own if (c["drafter"], c["merged"]) == (name, merged)}
            row = [f"{found[b]['tau']:.2f}" if b in found else "" for b in budgets]
            time = f"{found[16]['draft_ms']:.1f}" if "draft_ms" in found.get(16, {}) else ""
            print(f"| {name}{' + n-grams' if merged else ''} | " + " | ".join(row) + f" | {time} |")


def gains(cells: list[dict[str, Any]], base: str = "demo/dflash", budget: int = 16) -> None:
    """Each drafter's tokens a round over the base's, with an interval of 95 % over the answers (bootstrap).

    Also for the thirds of the answers that both draft worst, middling and best. Cells without figures of each answer
    are passed over.
    """
    cells = [c for c in cells if "each" in c]
    for group in dict.fromkeys((c["answers"], c["temperature"], c["coupled"]) for c in cells):
        own = {
            c["drafter"]: np.array(c["each"], dtype=float)
            for c in cells
            if (c["answers"], c["temperature"], c["coupled"], c["budget"], c["merged"])
            == (*group, budget, False)
        }
        if base not in own:
            continue
        plain = own[base][:, 0] > 0
        draws = np.random.default_rng(0).integers(plain.sum(), size=(2000, plain.sum()))
        print(f"\n{group[0]}, T = {group[1]:g}{', coupled' if group[2] else ''}, B={budget}: over {base}\n")
        print(
            "| drafter | all | 95 % | least accepted third | middle | most |\n| --- | --: | --: | --: | --: | --: |"
        )
        for name, each in own.items():
            order = np.argsort(_tau(own[base][plain]) + _tau(each[plain]))
            ratio = [
                _over(each[plain], own[base][plain], rows)
                for rows in (slice(None), *np.array_split(order, 3))
            ]
            low, high = np.quantile(
                [_over(each[plain], own[base][plain], rows) for rows in draws], (0.025, 0.975)
            )
            thirds = " | ".join(f"{value:.3f}" for value in ratio[1:])
            print(f"| {name} | {ratio[0]:.3f} | {low:.3f} to {high:.3f} | {thirds} |")


def _tau(each: Any) -> Any:
    return each[..., 1] / each[..., 0]


def _over(each: Any, base: Any, rows: Any) -> float:
    return float(_tau(each[rows].sum(axis=0)) / _tau(base[rows].sum(axis=0)))


if __name__ == "__main__":
    sys.exit(main())
