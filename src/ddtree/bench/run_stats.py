"""Statistics of a benchmark's runs: speeds, ratios, accepted tokens, and which methods are comparable."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ddtree.bench.methods import OFF, parse_method
from ddtree.bench.results import Results

Span = Literal["decode", "total"]
Record = dict[str, Any]


class RunStats:
    """Statistics of the runs of one temperature. A figure that nothing was measured for is NaN.

    Attributes:
        at: the temperature as in titles, such as "T=0".
        tasks: in the order they came.
        columns: names of methods and baselines.
        specs: the methods of the engine by name.

    Raises:
        ConfigError: the results name a method that is malformed.
    """

    def __init__(self, results: Results, temperature: float) -> None:
        self.temperature = temperature
        self.at = f"T={temperature:g}"
        self.columns = results.columns
        self.specs = {cell: parse_method(cell) for cell in results.settings["cells"]}
        runs = [run for run in results.runs if run["temperature"] == temperature]
        self.tasks: list[str] = list(dict.fromkeys(run["task"] for run in runs))
        self._runs: dict[str, dict[tuple[str, int], list[Record]]] = defaultdict(lambda: defaultdict(list))
        for run in sorted(runs, key=lambda run: run["turn"]):
            self._runs[run["cell"]][run["id"], run["message"]].append(run)

    def prompts(self, cell: str, task: str | None = None) -> list[list[Record]]:
        """Return the runs of each prompt, one a turn; of one task, or of all."""
        return [turns for turns in self._runs[cell].values() if task in (None, turns[0]["task"])]

    def runs(self, cell: str, task: str | None = None) -> list[Record]:
        """Return all runs of a method."""
        return [run for turns in self.prompts(cell, task) for run in turns]

    def speeds(self, cell: str, task: str | None = None, span: Span = "decode") -> list[float]:
        """Return tokens per second of each prompt: the median over its turns."""
        return _medians([speed(run, span) for run in turns] for turns in self.prompts(cell, task))

    def ratios(self, cell: str, base: str, task: str | None = None, span: Span = "decode") -> list[float]:
        """Return how many times as fast as another method each prompt is: of ratios within a turn, their median."""
        found = []
        for turns in self.prompts(cell, task):
            others = self._runs[base].get((turns[0]["id"], turns[0]["message"]), [])
            theirs = {run["turn"]: speed(run, span) for run in others}
            found.append([speed(run, span) / theirs.get(run["turn"], math.nan) for run in turns])
        return _medians(found)

    def ratio(self, cell: str, base: str, task: str | None = None, span: Span = "decode") -> float:
        """Return the median of the ratios over prompts."""
        return median(self.ratios(cell, base, task, span))

    def geometric(self, cell: str, base: str) -> float:
        """Return the geometric mean over tasks of the median ratios."""
        known = _known(self.ratio(cell, base, task) for task in self.tasks)
        return statistics.geometric_mean(known) if known else math.nan

    def accepted(self, cell: str, task: str | None = None) -> Counter[int]:
        """Return the number of rounds by accepted drafted tokens."""
        found: Counter[int] = Counter()
        for run in self.runs(cell, task):
            found.update({int(depth): count for depth, count in run["accepted_depth"].items()})
        return found

    def tau(self, cell: str, task: str | None = None) -> float:
        """Return tokens per round, pooled over all rounds."""
        depths = self.accepted(cell, task)
        rounds = depths.total()
        return 1 + sum(depth * count for depth, count in depths.items()) / rounds if rounds else math.nan

    def nodes(self, cell: str) -> float:
        """Return drafted nodes per round."""
        rounds = sum(run["rounds"] for run in self.runs(cell))
        return sum(run["nodes"] for run in self.runs(cell)) / rounds if rounds else math.nan

    def round_seconds(self, cell: str) -> dict[str, float]:
        """Return seconds of a round by part: the median over runs of each run's mean."""
        by_part: dict[str, list[float]] = defaultdict(list)
        for run in self.runs(cell):
            for part, seconds in run["seconds"].items():
                if part != "prefill" and run["rounds"]:
                    by_part[part].append(seconds / run["rounds"])
        return {part: statistics.median(values) for part, values in by_part.items()}

    def noise(self, cell: str) -> float:
        """Return the relative standard deviation of a prompt's speed over turns, median; NaN with a single turn."""
        speeds = [_known(speed(run, "decode") for run in turns) for turns in self.prompts(cell)]
        return median(
            [statistics.stdev(known) / statistics.mean(known) for known in speeds if len(known) > 1]
        )

    def adaptive(self) -> list[str]:
        """Return the methods that leave something to a policy, without those that hide the noise."""
        return [cell for cell, spec in self.specs.items() if spec.adaptive and spec.coupled]

    def rivals(self, cell: str) -> list[str]:
        """Return the fixed methods that an adaptive one chooses from: of its drafters, or of any when it has all."""
        own = self.specs[cell]
        fixed = [spec for spec in self.specs.values() if spec.coupled and not spec.adaptive]
        if own.method == "tree":
            fixed = [spec for spec in fixed if spec.method == "tree" and spec.members == own.members]
        elif own.members:
            fixed = [spec for spec in fixed if spec.name == OFF or spec.members == own.members]
        return [spec.name for spec in fixed]

    def best(self, cells: Sequence[str], task: str) -> str | None:
        """Return the method with the highest median ratio to `off`."""
        found = {cell: self.ratio(cell, OFF, task) for cell in cells}
        return max(cells, key=lambda cell: found[cell]) if _known(found.values()) else None

    def chain_of(self, cell: str) -> str | None:
        """Return the chain of the same drafters, or of all of them."""
        names = (re.sub(r"^[^@+]*", "chain", cell), "chain")
        return next((name for name in names if name in self.columns and name != cell), None)


def all_stats(results: Results) -> list[RunStats]:
    """Return the statistics of each temperature that was measured."""
    found = [RunStats(results, temperature) for temperature in results.settings["temperatures"]]
    return [stats for stats in found if stats.tasks]


def speed(run: Record, span: Span) -> float:
    """Return tokens per second of one run: of decoding, which begins after the first token, or with the prompt."""
    tokens, seconds = run["tokens"], run["total_s"]
    if span == "decode":
        tokens, seconds = tokens - 1, run["decode_s"]
    return tokens / seconds if seconds > 0 and (tokens > 0 or span == "total") else math.nan


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of no values."""
    return statistics.median(values) if values else math.nan


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; NaN of no values."""
    if len(values) < 2:
        return median(values), median(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _medians(values: Iterable[Iterable[float]]) -> list[float]:
    """Return the median of each list without its NaN; nothing for a list without any other value."""
    return [statistics.median(known) for each in values if (known := _known(each))]
