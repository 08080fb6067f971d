"""How close `auto` comes to the best fixed choice, without a machine's noise: real drafters, planner and policy, known
answers, and a clock that goes by the costs that a machine was measured to have.

    python benchmarks/acceptance.py answers --prompts spec_bench.jsonl --per-task 10 --max-tokens 64 --out answers.npz
    python benchmarks/auto_replay.py replay --answers answers.npz --prompts spec_bench.jsonl --per-task 10 \\
        --costs docs/results/demo-cpu.jsonl --out replay.jsonl
    python benchmarks/auto_replay.py table replay.jsonl

What verification accepts does not depend on who drafted, so an answer that is known is decoded anew in every way
without the target. A round takes what the raw figures of a `ddtree bench` say: drafting by the drafters that draft,
verification by the fitted curve. The policy starts from the acceptance that ships, and goes on from answer to answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from acceptance import examples_of

from ddtree.bench.methods import MethodSpec, parse_method
from ddtree.bench.prompt_sets import read
from ddtree.drafters import Drafter, parts_of
from ddtree.drafters.loading import load_drafter
from ddtree.engine.planner import Planner
from ddtree.model.demo import demo_drafter
from ddtree.model.pretrained import load_causal_lm
from ddtree.model.target import Target
from ddtree.policy import Request, cache
from ddtree.policy.controller import Policy
from ddtree.policy.latency import LatencyTable, Sample
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler
from ddtree.stats import Clock
from ddtree.train.data import Example
from ddtree.train.evaluate import show
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, following, walk

FIXED = (
    "off",
    "chain@dflash",
    *(f"tree:{budget}{own}" for own in ("@dflash", "@lookup", "") for budget in (1, 2, 4, 8, 16, 32)),
)
AUTO = ("tree:auto@dflash", "tree:auto@lookup", "tree:auto", "auto")
OVERHEAD = 0.001  # seconds of a round outside drafting and verification


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("replay")
    step.add_argument("--answers", type=Path, required=True)
    step.add_argument("--prompts", type=Path, required=True, help="those that were answered")
    step.add_argument("--per-task", type=int, required=True, help="as for the answers")
    step.add_argument("--drafter", default="demo", help="demo, or lookup: of which nothing is known")
    step.add_argument("--costs", type=Path, nargs="+", required=True, help="raw figures of ddtree bench")
    step.add_argument("--dtype", help="of target and drafter; default: the checkpoint's own")
    step.add_argument("--cells", nargs="+", default=[*FIXED, *AUTO])
    step.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    step.add_argument("--out", type=Path, required=True)
    step = steps.add_parser("table")
    step.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.step == "table":
        table([json.loads(line) for line in args.file.read_text().splitlines()])
        return
    target = Target(*load_causal_lm("demo", "cpu", args.dtype))
    drafter = load_drafter(args.drafter, target)
    assert drafter is not None
    members = [part.name for part in parts_of(drafter)]
    prompts = read([str(args.prompts)], per_task=args.per_task)
    sets = examples_of(args.answers, target, drafter.feature_layers, len(prompts))
    with args.out.open("a") as out:
        for costs in map(Costs, args.costs):
            for temperature in args.temperatures:
                for name in args.cells:
                    decoding = Decoding(parse_method(name, members), target, drafter, costs)
                    for place, example in sets[temperature]:
                        prompt = prompts[place % len(prompts)]
                        line = decoding(example, SamplingParams(temperature=temperature, seed=place))
                        about = {
                            "costs": costs.name,
                            "drafter": args.drafter,
                            "temperature": temperature,
                            "cell": name,
                        }
                        out.write(json.dumps({**about, "task": prompt.task, "id": prompt.id, **line}) + "\n")
                    out.flush()
                    print(costs.name, temperature, name, flush=True)


class Costs:
    """What the parts of a round take on a machine, in seconds, by the raw figures of a bench."""

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        curve = next(line for line in lines if line["kind"] == "latency")
        self._widths, self._seconds = curve["widths"], curve["seconds"]
        taken = defaultdict(list)
        for line in lines:
            method, _, name = line.get("cell", "").partition("@")
            if line["kind"] == "run" and name and "+" not in name and method.startswith("tree:"):
                taken[name].append((line["seconds"]["draft"] + line["seconds"]["build"]) / line["rounds"])
        self._draft = {name: statistics.median(own) for name, own in taken.items()}

    def verify(self, width: int) -> float:
        return float(np.interp(width, self._widths, self._seconds))

    def draft(self, names: Sequence[str]) -> float:
        return sum(self._draft[name] for name in names)

    def model(self) -> LatencyTable:
        """The policy's: this machine, well measured."""
        verify = [Sample(width, 1, 0.0, self.verify(width)) for width in self._widths]
        draft = {name: [Sample(17, 1, 0.0, seconds)] for name, seconds in self._draft.items()}
        return LatencyTable(verify, draft, machine={})


@dataclass
class Reading:
    """An answer as far as it is decoded (a `ddtree.planning.Text`)."""

    whole: list[int]
    tokens: list[int]
    request: Request
    sampler: Sampler
    fresh: bool = True

    @property
    def left(self) -> int:
        return len(self.whole) - len(self.tokens)


class Decoding:
    """One way of decoding, that goes from answer to answer and learns."""

    def __init__(self, cell: MethodSpec, target: Target, drafter: Drafter, costs: Costs) -> None:
        self.cell, self.target, self.drafter, self.costs = cell, target, drafter, costs
        self.planner = Planner(target, drafter, Clock())
        known = (
            cache.load_acceptance(demo_drafter() / cache.ACCEPTANCE_FILE) if drafter.feature_layers else {}
        )
        self.planner.policy = Policy(costs.model(), known)

    def __call__(self, example: Example, params: SamplingParams) -> dict[str, Any]:
        """Decode an answer anew: its rounds and the seconds that they take."""
        whole, start = example.tokens.tolist(), example.answer_start
        sampler = Sampler(params, self.target.vocab_size, (), prompt_length=start)
        cell = self.cell
        request = self.planner.request(
            cell.method, cell.budget, MAX_DEPTH, cell.members, not sampler.params.greedy
        )
        text = Reading(whole, whole[: start + 1], request, sampler)
        seconds, rounds, nodes, arms = 0.0, 0, 0, Counter[str]()
        self.drafter.add_row()
        show(self.drafter, 0, example, slice(start), self.target.dtype)
        while text.left:
            drafting, known = text.left > 1, len(text.tokens)
            plan = self.planner.plan([text], MAX_BUDGET)
            paths, _ = walk(plan.tree, [text.tokens], following([whole]))
            path, arm = paths[0], plan.choices[0].arm
            made = whole[known : known + len(path)]
            text.tokens, text.fresh = text.tokens + made, False
            show(self.drafter, 0, example, slice(known - 1, len(text.tokens) - 1), self.target.dtype)
            parts = {
                "draft": self.costs.draft(arm.members) if drafting else 0.0,
                "build": 0.0,
                "verify": self.costs.verify(plan.tree.sizes[0]),
                "walk": OVERHEAD / 2,
                "commit": OVERHEAD / 2,
            }
            self.planner.learn(plan, [path], [made], parts)
            seconds += sum(parts.values())
            rounds, nodes = rounds + 1, nodes + plan.tree.sizes[0] - 1
            arms[str(arm)] += 1
        self.drafter.drop_row(0)
        tokens = len(whole) - start - 1
        return {
            "tokens": tokens,
            "seconds": round(seconds, 6),
            "rounds": rounds,
            "nodes": nodes,
            "arms": dict(arms),
        }


def table(lines: list[dict[str, Any]]) -> None:
    """Markdown: each automatic choice against the best fixed one of its drafters, by task."""
    groups = [(line["costs"], line["drafter"], line["temperature"]) for line in lines]
    for costs, drafter, temperature in dict.fromkeys(groups):
        own = [
            line for line, group in zip(lines, groups, strict=True) if group == (costs, drafter, temperature)
        ]
        tasks = list(dict.fromkeys(line["task"] for line in own))
        speeds: dict[str, list[float]] = {}
        for name in dict.fromkeys(line["cell"] for line in own):
            mine = [line for line in own if line["cell"] == name]
            speeds[name] = [_speed([line for line in mine if line["task"] == task]) for task in tasks]
            speeds[name].append(_speed(mine))
        count = len(own) // len(speeds)
        print(
            f"\n{costs}, drafter {drafter}, T={temperature:g}: {count} answers, speed over plain decoding\n"
        )
        print("| way | " + " | ".join([*tasks, "all"]) + " |")
        print("| --- " + "| --: " * (len(tasks) + 1) + "|")
        for name, row in speeds.items():
            print(
                f"| {name} | "
                + " | ".join(f"{s / p:.2f}" for s, p in zip(row, speeds["off"], strict=True))
                + " |"
            )
        for name in AUTO:
            if name not in speeds:
                continue
            drafters = name.partition("@")[2]
            rivals = [
                other
                for other in speeds
                if other not in AUTO
                and (name == "auto" or other == "off" or other.partition("@")[2] == drafters)
            ]
            best = [max(speeds[other][place] for other in rivals) for place in range(len(tasks) + 1)]
            ratios = [f"{mine / theirs:.3f}" for mine, theirs in zip(speeds[name], best, strict=True)]
            print(f"| {name} / best fixed | " + " | ".join(ratios) + " |")


def _speed(lines: list[dict[str, Any]]) -> float:
    return sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
