"""Figures out of raw ones: speeds, ratios, acceptance. Knows no models, and needs the standard library alone.

Of several turns of one prompt the median counts; of the prompts of a task, their median; of tasks, the geometric mean.
Ratios are taken within a turn first, where both sides ran one after the other, so that a busy machine slows both.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ddtree.bench.raw import Raw

Span = Literal["decode", "total"]
Record = dict[str, Any]
PromptKey = tuple[str, int]  # id, message


class Figures:
    """The runs of one temperature.

    Attributes:
        temperature: of all runs here.
        tasks: in the order they came.
        columns: cells and baselines.
    """

    def __init__(self, raw: Raw, temperature: float) -> None:
        self.temperature = temperature
        self.columns = raw.columns
        runs = [run for run in raw.runs if run["temperature"] == temperature]
        self.tasks: list[str] = list(dict.fromkeys(run["task"] for run in runs))
        self._runs: dict[str, dict[PromptKey, list[Record]]] = defaultdict(lambda: defaultdict(list))
        for run in sorted(runs, key=lambda run: run["turn"]):
            self._runs[run["cell"]][run["id"], run["message"]].append(run)

    def runs(self, cell: str, task: str | None = None) -> list[Record]:
        """Of a task, or of all; each prompt's turns together."""
        return [
            run for turns in self._runs[cell].values() for run in turns if task is None or run["task"] == task
        ]

    def speeds(self, cell: str, task: str | None = None, span: Span = "decode") -> list[float]:
        """Tokens per second of each prompt, medians over its turns."""
        return [
            statistics.median(known)
            for turns in self._of(cell, task)
            if (known := [value for run in turns if (value := speed(run, span)) is not None])
        ]

    def ratios(self, cell: str, base: str, task: str | None = None, span: Span = "decode") -> list[float]:
        """How many times as fast as another cell: of each prompt, the median over its turns."""
        found = []
        for key, turns in self._runs[cell].items():
            if task is not None and turns[0]["task"] != task:
                continue
            others = {run["turn"]: speed(run, span) for run in self._runs[base].get(key, [])}
            pairs = [(speed(run, span), others.get(run["turn"])) for run in turns]
            within = [one / other for one, other in pairs if one is not None and other is not None]
            if within:
                found.append(statistics.median(within))
        return found

    def tau(self, cell: str, task: str | None = None) -> float | None:
        """Tokens a round, of all rounds of all prompts; None where none were counted."""
        depths = self.accepted(cell, task)
        rounds = depths.total()
        return 1 + sum(depth * count for depth, count in depths.items()) / rounds if rounds else None

    def accepted(self, cell: str, task: str | None = None) -> Counter[int]:
        """How often so many drafted tokens were accepted in a round."""
        found: Counter[int] = Counter()
        for run in self.runs(cell, task):
            found.update({int(depth): count for depth, count in run.get("accepted_depth", {}).items()})
        return found

    def round_seconds(self, cell: str) -> dict[str, float]:
        """Seconds of the parts of a round: of each prompt its mean, of the prompts their median."""
        by_part: dict[str, list[float]] = defaultdict(list)
        for run in self.runs(cell):
            for part, seconds in run.get("seconds", {}).items():
                if part != "prefill" and run["rounds"]:
                    by_part[part].append(seconds / run["rounds"])
        return {part: statistics.median(values) for part, values in by_part.items()}

    def nodes(self, cell: str) -> float | None:
        """Drafted nodes a round."""
        rounds = sum(run.get("rounds", 0) for run in self.runs(cell))
        return sum(run.get("nodes", 0) for run in self.runs(cell)) / rounds if rounds else None

    def verdicts(self, cell: str) -> Counter[str]:
        return Counter(run["verdict"]["kind"] for run in self.runs(cell))

    def noise(self, cell: str) -> float | None:
        """Relative standard deviation of a prompt's speed from turn to turn, median; None with a single turn."""
        found = []
        for turns in self._runs[cell].values():
            known = [value for run in turns if (value := speed(run, "decode")) is not None]
            if len(known) > 1:
                found.append(statistics.stdev(known) / statistics.mean(known))
        return statistics.median(found) if found else None

    def geometric(self, cell: str, base: str, span: Span = "decode") -> float | None:
        """Geometric mean over tasks of the median ratio."""
        medians = [median(self.ratios(cell, base, task, span)) for task in self.tasks]
        known = [value for value in medians if value is not None]
        return math.exp(statistics.mean(map(math.log, known))) if known else None

    def best(self, cells: Iterable[str], base: str, task: str) -> str | None:
        """The cell that was fastest, by the median of its ratios to `base`."""
        found = {
            cell: value for cell in cells if (value := median(self.ratios(cell, base, task))) is not None
        }
        return max(found, key=lambda cell: found[cell]) if found else None

    def _of(self, cell: str, task: str | None) -> list[list[Record]]:
        return [turns for turns in self._runs[cell].values() if task is None or turns[0]["task"] == task]


def speed(run: Record, span: Span) -> float | None:
    """Tokens per second of one run: of decoding, which begins after the first token, or with the prompt's time."""
    if span == "total":
        return run["tokens"] / run["total_s"] if run["total_s"] > 0 else None
    tokens = run["tokens"] - 1
    return tokens / run["decode_s"] if tokens > 0 and run["decode_s"] > 0 else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def at_least(values: Sequence[float], bound: float = 1.0) -> int:
    """How many are as large."""
    return sum(value >= bound for value in values)
