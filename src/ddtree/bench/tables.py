"""Tables of a benchmark's results: speeds, ratios, accepted tokens, and checks of claims about them."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from ddtree.bench.methods import OFF, UNCOUPLED, parse_method
from ddtree.bench.results import Results

PARTS = ("draft", "build", "verify", "walk", "commit")
_NO_SLOWER = 0.97  # a ratio from here on counts as no slower: the rest is noise
_NONE = "-"


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: unique among the tables of a report.
        header: names of the columns; the first one names the rows.
        rows: as wide as the header.
        detail: too long for a terminal.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    detail: bool = False

    def text(self) -> str:
        """Return the table for a terminal: the first column to the left, the others to the right."""
        lines = [self.header, *self.rows]
        first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = [
            "  ".join(
                [line[0].ljust(first), *(cell.rjust(w) for cell, w in zip(line[1:], widths, strict=True))]
            )
            for line in lines
        ]
        return "\n".join([self.title, *map(str.rstrip, body)])

    def markdown(self) -> str:
        """Return the table in Markdown, below its title."""
        rule = ["---"] + ["--:"] * (len(self.header) - 1)
        lines = [[inline(cell).replace("|", r"\|") for cell in line] for line in (self.header, *self.rows)]
        body = ["| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:])]
        return "\n".join([f"**{self.title}**", "", *body])


Span = Literal["decode", "total"]


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
        self._runs: dict[str, dict[tuple[str, int], list[Any]]] = defaultdict(lambda: defaultdict(list))
        for run in sorted(runs, key=lambda run: run["turn"]):
            self._runs[run["cell"]][run["id"], run["message"]].append(run)

    def prompts(self, cell: str, task: str | None = None) -> list[list[dict[str, Any]]]:
        """Return the runs of each prompt, one a turn; of one task, or of all."""
        return [turns for turns in self._runs[cell].values() if task in (None, turns[0]["task"])]

    def runs(self, cell: str, task: str | None = None) -> list[dict[str, Any]]:
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


def speed(run: dict[str, Any], span: Span) -> float:
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


def inline(text: str) -> str:
    """Return any text as a part of a line of Markdown: without line ends and comments."""
    return " ".join(text.split()).replace("<!--", "&lt;!--")


def tables(results: Results) -> list[Table]:
    """Return all tables: those of each temperature, then the checks."""
    everything = all_stats(results)
    checks = _checks(everything)
    found = [table for stats in everything for table in _of_temperature(stats)]
    return [*found, checks] if checks.rows else found


def _of_temperature(stats: RunStats) -> Iterator[Table]:
    yield _speedups(stats)
    yield _taus(stats)
    yield _speeds(stats)
    for cell in stats.adaptive():
        yield _against(stats, cell)
    yield _rounds(stats)
    coupled = [cell.removesuffix(UNCOUPLED) for cell in stats.specs if cell.endswith(UNCOUPLED)]
    if stats.temperature > 0 and (both := [cell for cell in coupled if cell in stats.specs]):
        yield _coupling(stats, both)
    yield _detail(stats)


def _speedups(stats: RunStats) -> Table:
    columns = stats.columns[1:]
    rows = [[task, *(_number(stats.ratio(cell, OFF, task)) for cell in columns)] for task in stats.tasks]
    for base, name in ((OFF, "geometric mean"), ("hf", "geometric mean, over hf")):
        if base in stats.columns:
            rows.append([name, *(_number(stats.geometric(cell, base)) for cell in columns)])
    return Table(f"Speedup of decoding over off, {stats.at}", ["task", *columns], rows)


def _taus(stats: RunStats) -> Table:
    columns = [cell for cell in stats.columns if cell != OFF and stats.accepted(cell)]
    every = (*stats.tasks, None)
    rows = [[task or "all", *(_number(stats.tau(cell, task)) for cell in columns)] for task in every]
    return Table(f"Tokens a round (tau), {stats.at}", ["task", *columns], rows)


_SPEEDS = ("tokens/s decoding", "tokens/s in all", "speedup decoding", "quartiles")


def _speeds_of(stats: RunStats, cell: str, task: str | None = None) -> list[str]:
    """Return the figures of the columns `_SPEEDS`."""
    decoding, total = (median(stats.speeds(cell, task, span)) for span in get_args(Span))
    ratios = stats.ratios(cell, OFF, task)
    low, high = map(_number, quartiles(ratios))
    return [_number(decoding, ".1f"), _number(total, ".1f"), _number(median(ratios)),
            f"{low} to {high}" if ratios else _NONE]  # fmt: skip


def _speeds(stats: RunStats) -> Table:
    verdicts = ("equal", "near-tie", "different")
    header = ["cell", *_SPEEDS, "speedup in all", "nodes a round", "noise", *verdicts]
    rows = []
    for cell in stats.columns:
        counts = Counter(run["verdict"]["kind"] for run in stats.runs(cell))
        row = [cell, *_speeds_of(stats, cell), _number(stats.ratio(cell, OFF, span="total"))]
        row += [_number(stats.nodes(cell), ".1f"), _number(stats.noise(cell), ".1%")]
        rows.append([*row, *(str(counts[kind]) for kind in verdicts)])
    return Table(f"Speeds, medians over all prompts, {stats.at}", header, rows)


def _detail(stats: RunStats) -> Table:
    header = ["task, cell", "prompts", "tau", *_SPEEDS]
    rows = []
    for task, cell in product(stats.tasks, stats.columns):
        tau = _NONE if cell == OFF else _number(stats.tau(cell, task))
        prompts = str(len(stats.speeds(cell, task, "total")))
        rows.append([f"{task}, {cell}", prompts, tau, *_speeds_of(stats, cell, task)])
    return Table(f"Each task and cell, {stats.at}", header, rows, detail=True)


def _against(stats: RunStats, cell: str) -> Table:
    chain = stats.chain_of(cell)
    header = ["task", f"{cell} / off", f"{cell} / {chain or 'chain'}", "best fixed", f"{cell} / best fixed"]
    rows = []
    for task in stats.tasks:
        best = stats.best(stats.rivals(cell), task)
        wins = [_wins(stats.ratios(cell, other, task)) if other else _NONE for other in (OFF, chain, best)]
        rows.append([task, *wins[:2], best or _NONE, wins[2]])
    return Table(f"{cell} against fixed choices, {stats.at}", header, rows)


def _rounds(stats: RunStats) -> Table:
    found = {cell: seconds for cell in stats.columns if (seconds := stats.round_seconds(cell))}
    rows = [[cell, *(_number(1e3 * parts.get(part, 0.0)) for part in PARTS)] for cell, parts in found.items()]
    return Table(f"Milliseconds of a round by part, {stats.at}", ["cell", *PARTS], rows)


def _coupling(stats: RunStats, cells: list[str]) -> Table:
    header = ["task"]
    for cell in cells:
        header += [f"{cell} tau", "uncoupled tau", "gain", "speed gain"]
    rows = []
    for task in (*stats.tasks, None):
        row = [task or "all"]
        for cell in cells:
            on, off = stats.tau(cell, task), stats.tau(cell + UNCOUPLED, task)
            gains = on / off - 1, stats.ratio(cell, cell + UNCOUPLED, task) - 1
            row += [_number(on), _number(off), *(_number(gain, "+.1%") for gain in gains)]
        rows.append(row)
    title = f"Drafting that looks at the noise, against drafting that does not, {stats.at}"
    return Table(title, header, rows)


def _checks(everything: Sequence[RunStats]) -> Table:
    """Return in how many tasks and temperatures each claim holds, and where it holds least."""
    claims: dict[tuple[str, float], list[tuple[float, str]]] = defaultdict(list)
    for stats, task in [(each, task) for each in everything for task in each.tasks]:
        for cell, spec in stats.specs.items():
            chain = stats.chain_of(cell)
            if chain and spec.coupled and spec.method == "tree" and not spec.adaptive:
                ratio = stats.tau(cell, task) / stats.tau(chain, task)
                claims[f"tau({cell}) >= tau({chain})", 1.0].append((ratio, f"{task}, {stats.at}"))
        for cell in stats.adaptive():
            chain, best = stats.chain_of(cell), stats.best(stats.rivals(cell), task)
            for other, name in ((OFF, OFF), (chain, chain), (best, "the best fixed cell")):
                if other:
                    claim = f"speed({cell}) >= {_NO_SLOWER} of {name}", _NO_SLOWER
                    claims[claim].append((stats.ratio(cell, other, task), f"{task}, {stats.at}"))
    rows = []
    for (text, bound), found in claims.items():
        if values := [(ratio, where) for ratio, where in found if ratio > 0]:
            least, where = min(values)
            held = sum(ratio >= bound for ratio, _ in values)
            rows.append([text, f"{held} of {len(values)}", _number(least, ".3f"), where])
    return Table("Checks", ["claim", "holds in", "least ratio", "there"], rows)


def _number(value: float, form: str = ".2f") -> str:
    return _NONE if math.isnan(value) else format(value, form)


def _wins(values: list[float]) -> str:
    wins = sum(value >= 1 for value in values)
    return f"{median(values):.3f} ({wins} of {len(values)})" if values else _NONE
