"""Statistics of a benchmark's runs: speeds, ratios, accepted tokens, and which methods are comparable."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from ddtree.bench.methods import OFF, UNCOUPLED
from ddtree.bench.results import Results

Span = Literal["decode", "total"]
Record = dict[str, Any]


class RunStats:
    """Statistics of the runs of one temperature.

    Attributes:
        at: the temperature as in titles, such as "T=0".
        tasks: in the order they came.
        columns: names of methods and baselines.
    """

    def __init__(self, results: Results, temperature: float) -> None:
        self.temperature = temperature
        self.at = f"T={temperature:g}"
        self.columns = results.columns
        self.baselines = results.settings["baselines"]
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
        known = [[speed(run, span) for run in turns] for turns in self.prompts(cell, task)]
        return _medians(known)

    def ratios(self, cell: str, base: str, task: str | None = None, span: Span = "decode") -> list[float]:
        """Return how many times as fast as another method each prompt is: of ratios within a turn, their median."""
        found = []
        for turns in self.prompts(cell, task):
            others = self._runs[base].get((turns[0]["id"], turns[0]["message"]), [])
            theirs = {run["turn"]: speed(run, span) for run in others}
            found.append([quotient(speed(run, span), theirs.get(run["turn"])) for run in turns])
        return _medians(found)

    def ratio(self, cell: str, base: str, task: str | None = None, span: Span = "decode") -> float | None:
        """Return the median of the ratios over prompts."""
        return median(self.ratios(cell, base, task, span))

    def geometric(self, cell: str, base: str) -> float | None:
        """Return the geometric mean over tasks of the median ratios."""
        found = [self.ratio(cell, base, task) for task in self.tasks]
        known = [value for value in found if value is not None]
        return statistics.geometric_mean(known) if known else None

    def accepted(self, cell: str, task: str | None = None) -> Counter[int]:
        """Return the number of rounds by accepted drafted tokens."""
        found: Counter[int] = Counter()
        for run in self.runs(cell, task):
            found.update({int(depth): count for depth, count in run["accepted_depth"].items()})
        return found

    def tau(self, cell: str, task: str | None = None) -> float | None:
        """Return tokens per round, pooled over all rounds; None where no rounds were counted."""
        depths = self.accepted(cell, task)
        rounds = depths.total()
        return 1 + sum(depth * count for depth, count in depths.items()) / rounds if rounds else None

    def nodes(self, cell: str) -> float | None:
        """Return drafted nodes per round."""
        rounds = sum(run["rounds"] for run in self.runs(cell))
        return sum(run["nodes"] for run in self.runs(cell)) / rounds if rounds else None

    def round_seconds(self, cell: str) -> dict[str, float]:
        """Return seconds of a round by part: the median over runs of each run's mean."""
        by_part: dict[str, list[float]] = defaultdict(list)
        for run in self.runs(cell):
            for part, seconds in run["seconds"].items():
                if part != "prefill" and run["rounds"]:
                    by_part[part].append(seconds / run["rounds"])
        return {part: statistics.median(values) for part, values in by_part.items()}

    def noise(self, cell: str) -> float | None:
        """Return the relative standard deviation of a prompt's speed over turns, median; None with a single turn."""
        found = []
        for turns in self.prompts(cell):
            known = [value for run in turns if (value := speed(run, "decode")) is not None]
            if len(known) > 1:
                found.append(statistics.stdev(known) / statistics.mean(known))
        return median(found)

    def adaptive(self) -> list[str]:
        """Return the methods that leave something to a policy, without those that hide the noise."""
        return [cell for cell in self.columns if base_of(cell) in ("auto", "tree:auto") and is_coupled(cell)]

    def rivals(self, cell: str) -> list[str]:
        """Return the fixed methods that an adaptive one chooses from: of its drafters, or of any when it has all."""
        others = {*self.adaptive(), *self.baselines}
        fixed = [name for name in self.columns if name not in others and is_coupled(name)]
        same = [name for name in fixed if _drafters(name) == _drafters(cell)]
        if base_of(cell) == "tree:auto":
            return [name for name in same if name.startswith("tree:")]
        return [name for name in fixed if not _drafters(cell) or name == OFF or name in same]

    def best(self, cells: Sequence[str], task: str) -> str | None:
        """Return the method with the highest median ratio to `off`."""
        found = {cell: value for cell in cells if (value := self.ratio(cell, OFF, task)) is not None}
        return max(found, key=lambda cell: found[cell]) if found else None

    def chain_of(self, cell: str) -> str | None:
        """Return the chain of the same drafters, or of all of them."""
        names = (f"chain{cell[len(base_of(cell)) :]}", "chain")
        return next((name for name in names if name in self.columns and name != cell), None)


def speed(run: Record, span: Span) -> float | None:
    """Return tokens per second of one run: of decoding, which begins after the first token, or with the prompt."""
    tokens, seconds = run["tokens"], run["total_s"]
    if span == "decode":
        tokens, seconds = tokens - 1, run["decode_s"]
    return tokens / seconds if seconds > 0 and (tokens > 0 or span == "total") else None


def median(values: Sequence[float]) -> float | None:
    """Return the median; None of no values."""
    return statistics.median(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the first and the third quartile; None of no values."""
    if len(values) < 2:
        return (values[0], values[0]) if values else None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _medians(values: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the median of each list without what is None; nothing for a list of None alone."""
    known = [[value for value in each if value is not None] for each in values]
    return [statistics.median(each) for each in known if each]


def quotient(one: float | None, other: float | None) -> float | None:
    """Return one / other; None where either is."""
    return None if one is None or other is None else one / other


def all_stats(results: Results) -> list[RunStats]:
    """Return the statistics of each temperature that was measured."""
    found = [RunStats(results, temperature) for temperature in results.settings["temperatures"]]
    return [stats for stats in found if stats.tasks]


def base_of(cell: str) -> str:
    """Return a method's name without its drafters, such as "tree:16" of "tree:16@dflash"."""
    return cell.removesuffix(UNCOUPLED).partition("@")[0]


def is_coupled(cell: str) -> bool:
    """Return whether a method's drafters may look at the noise of sampled rows."""
    return not cell.endswith(UNCOUPLED)


def with_coupling(cell: str) -> str:
    """Return the name of the same method with coupling."""
    return cell.removesuffix(UNCOUPLED)


def _drafters(cell: str) -> str:
    return cell.partition("@")[2]
