"""Seconds of the parts of a round on one machine: a table that is measured once and that rounds keep up to date."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ConfigError
from ddtree.tree import MAX_BUDGET

Array = NDArray[np.float64]

FORMAT = 2
CUT_SHORT = "cut_short"
"""Key of `LatencyTable.machine`: points were left out for want of time, so the table is not kept for the next run."""

# Rounds of a rolling median. Half: bursts of three rounds are followed; double: a slower machine is noticed in ten
# rounds and not in five.
WINDOW = 9
# Tokens of context over which one interpolated curve serves: half, twice the curves; double, a coarser context.
CONTEXT_STEP = 64
# Share of a plain pass that the rest of a round takes until the first round has shown it; then it counts for nothing.
OVERHEAD = 0.03


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        width: nodes a row, root included, e.g. 17; trees of a batch are padded to the widest.
        rows: rows of the batch.
        context: mean committed tokens a row.
        seconds: the time it took.
    """

    width: int
    rows: int
    context: float
    seconds: float


def medians(samples: Iterable[Sample]) -> list[Sample]:
    """Return one sample for each (rows, width, context), with the median of its seconds, in this order.

    Raises:
        ConfigError: a sample is impossible.
    """
    found: defaultdict[tuple[int, int, float], list[float]] = defaultdict(list)
    for sample in samples:
        if not (sample.width >= 1 and sample.rows >= 1 and 0 <= sample.context < math.inf):
            raise ConfigError(f"{sample} is no measurement: width and rows start at 1, context at 0")
        if not 0 < sample.seconds < math.inf:
            raise ConfigError(f"{sample} is no measurement: its seconds must be a positive number")
        found[sample.rows, sample.width, sample.context].append(sample.seconds)
    return [
        Sample(width, rows, context, median(seconds))
        for (rows, width, context), seconds in sorted(found.items())
    ]


class LatencyTable:
    """Predicts the seconds of verifying, of drafting, and of what else a round does.

    Measured points are interpolated. Verification is then corrected by what rounds took: one factor for the pace of
    the whole machine, and one for each cell (batch size and tree width, both in powers of two) relative to it. Cells
    that no round has used lie between their neighbours, so a first measurement on a busy machine is repaired too.

    Args:
        verify: measurements of verification, at least one.
        draft: measurements of drafting and tree building by the drafter's name; the width is the budget + 1.
        machine: a readable description of what was measured: device, threads, versions, dtype, date.

    Attributes:
        machine: as given.
        points: the medians of verification.
        draft_points: the medians of drafting, by name.

    Raises:
        ConfigError: there is no measurement of verification, or an impossible one.
    """

    def __init__(
        self, verify: Iterable[Sample], draft: Mapping[str, Iterable[Sample]], *, machine: Mapping[str, Any]
    ) -> None:
        self.machine = dict(machine)
        self.points = medians(verify)
        self.draft_points = {name: medians(own) for name, own in draft.items()}
        if not (self.points and all(self.draft_points.values())):
            raise ConfigError("a list of measurements is empty: run ddtree calibrate")
        average = bool(machine.get(CUT_SHORT))
        self._verify = _Curves(self.points, average)
        self._draft = {name: _Curves(own, average) for name, own in self.draft_points.items()}
        self._measured: dict[tuple[int, int], Array] = {}
        self._pace = _Rolling()
        self._cells: defaultdict[int, defaultdict[int, _Rolling]] = defaultdict(lambda: defaultdict(_Rolling))
        self._last: tuple[_Rolling, float] | None = None
        self._draft_pace: dict[tuple[frozenset[str], bool], _Rolling] = {}
        self._overhead = _Rolling()

    def verify(self, nodes: int, rows: int = 1, context: float = 0.0) -> float:
        """Return the seconds of verifying `nodes` nodes a row besides the root."""
        return float(self.verify_up_to(nodes, rows, context)[nodes])

    def verify_up_to(self, nodes: int, rows: int = 1, context: float = 0.0) -> Array:
        """Return the seconds [nodes + 1] of verifying 0..`nodes` nodes a row besides the root; they never fall."""
        seconds = self._interpolated(rows, context)[: nodes + 1]
        if cells := self._cells.get(batch_class(rows)):
            sizes = sorted(cells)
            corrections = [cells[size].shrunk() for size in sizes]
            seconds = seconds * np.exp(np.interp(_SIZES[: nodes + 1], sizes, corrections))
            seconds = np.maximum.accumulate(seconds)
        return seconds * math.exp(self._pace.value())

    def draft(
        self, names: Sequence[str], nodes: int, rows: int = 1, context: float = 0.0, sampled: bool = False
    ) -> float:
        """Return the seconds of drafting `nodes` nodes a row by the named drafters and building the tree.

        Raises:
            ConfigError: a drafter was not measured.
        """
        if missing := [name for name in names if name not in self._draft]:
            raise ConfigError(f"drafting with {missing[0]!r} was not measured: run ddtree calibrate with it")
        widths = np.array([nodes + 1.0])
        total = sum(float(self._draft[name].seconds(widths, rows, context)[0]) for name in names)
        return total * math.exp(self._draft_pace.get((frozenset(names), sampled), self._pace).value())

    def overhead(self) -> float:
        """Return the seconds of a round outside drafting and verification."""
        return self._overhead.value() or OVERHEAD * self.verify(0)

    def round_up_to(
        self, names: Sequence[str], nodes: int, rows: int = 1, context: float = 0.0, sampled: bool = False
    ) -> Array:
        """Return the seconds [nodes + 1] of rounds that verify 0..`nodes` nodes a row, drafted by `names` (or none)."""
        draft = self.draft(names, nodes, rows, context, sampled) if names else 0.0
        return self.verify_up_to(nodes, rows, context) + draft + self.overhead()

    def observe_verify(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """Learn that verifying `nodes` nodes a row besides the root took so long; impossible times are ignored."""
        if 0 < seconds < math.inf:
            ratio = math.log(seconds / float(self._interpolated(rows, context)[nodes]))
            cell = self._cells[batch_class(rows)][round(math.log2(nodes + 1))]
            # Neighbouring rounds ran at about the same pace, so a difference of their ratios is owed to their cells.
            before, self._last = self._last, (cell, ratio)
            if before is not None and before[0] is not cell:
                other, difference = before[0], ratio - before[1]
                own, others = difference + other.shrunk(), cell.shrunk() - difference
                cell.add(own)
                other.add(others)
            self._pace.add(ratio - cell.shrunk())

    def observe_draft(
        self, names: Sequence[str], nodes: int, rows: int, context: float, sampled: bool, seconds: float
    ) -> None:
        """Learn that the named drafters took so long; impossible times are ignored."""
        if 0 < seconds < math.inf:
            predicted = self.draft(names, nodes, rows, context, sampled)
            key = frozenset(names), sampled
            ratio = math.log(seconds / predicted) + self._draft_pace.get(key, self._pace).value()
            self._draft_pace.setdefault(key, _Rolling()).add(ratio)

    def observe_overhead(self, seconds: float) -> None:
        """Learn that the rest of a round took so long; impossible times are ignored."""
        if 0 < seconds < math.inf:
            self._overhead.add(seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements as plain JSON values; corrections by rounds are not kept."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "columns": ["width", "rows", "context", "seconds"],
            "verify": [astuple(point) for point in self.points],
            "draft": {name: [astuple(point) for point in own] for name, own in self.draft_points.items()},
        }

    @staticmethod
    def from_dict(values: Any) -> LatencyTable:
        """Return the table that `as_dict` gave. Raises ConfigError where it is another format or damaged."""
        try:
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}, not {FORMAT}")
            verify = [Sample(*row) for row in values["verify"]]
            draft = {name: [Sample(*row) for row in own] for name, own in values["draft"].items()}
            return LatencyTable(verify, draft, machine=values["machine"])
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"the latency table is damaged ({error}): run ddtree calibrate") from error

    def _interpolated(self, rows: int, context: float) -> Array:
        """Return the measured seconds [MAX_BUDGET + 1] of verification, at a context rounded to 64 tokens."""
        key = rows, int(context) // CONTEXT_STEP
        if key not in self._measured:
            widths = np.arange(1.0, MAX_BUDGET + 2)
            self._measured[key] = self._verify.seconds(widths, rows, (key[1] + 0.5) * CONTEXT_STEP)
        return self._measured[key]


def batch_class(rows: int) -> int:
    """Return the next power of two: batches of 1, 2, 3-4, 5-8, ... rows are told apart."""
    return 1 << (rows - 1).bit_length()


class _Curves:
    """Measured seconds by batch size: linear between widths and in the context, and beyond the widest.

    A batch size that was not measured costs what the nearest one does for as many tokens. Beyond the widest tree, a
    node costs what the last ones did, or `average` of all where few were measured.
    """

    def __init__(self, points: Sequence[Sample], average: bool) -> None:
        self._by_rows = {
            rows: _curve([p for p in points if p.rows == rows]) for rows in {p.rows for p in points}
        }
        self._average = average

    def seconds(self, widths: Array, rows: int, context: float) -> Array:
        """Return the seconds for each width (root included), in their shape."""
        nearest = min(self._by_rows, key=lambda known: (abs(math.log(known / rows)), known))
        known, at_zero, slopes = self._by_rows[nearest]
        seconds, widths = at_zero + slopes * context, widths * rows / nearest
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0
        if self._average:
            slope = max(slope, seconds[-1] / known[-1])
        return np.interp(widths, known, seconds) + slope * np.maximum(0.0, widths - known[-1])


def _curve(points: Sequence[Sample]) -> tuple[Array, Array, Array]:
    """Return widths, seconds without context, and seconds by token of context; both never fall with the width."""
    by_width: defaultdict[int, list[Sample]] = defaultdict(list)
    for point in points:
        by_width[point.width].append(point)
    widths = np.array(sorted(by_width), dtype=np.float64)
    # Widths that were measured at one context alone take their slope from their neighbours.
    lines = {
        width: np.polyfit([p.context for p in own], [p.seconds for p in own], 1)
        for width, own in by_width.items()
        if len(own) > 1
    }
    sloped = sorted(lines)
    slopes = np.zeros(len(widths))
    if sloped:
        slopes = np.interp(widths, sloped, np.maximum.accumulate([max(0.0, lines[w][0]) for w in sloped]))
    seconds = np.array([np.mean([point.seconds for point in by_width[int(width)]]) for width in widths])
    contexts = np.array([np.mean([point.context for point in by_width[int(width)]]) for width in widths])
    # Noise may make the context look dearer than the whole: a tenth of the pass is left for the rest.
    return widths, np.maximum.accumulate(np.maximum(seconds - slopes * contexts, seconds / 10)), slopes


class _Rolling:
    """A rolling median of the last `WINDOW` values: half of them must agree, so single bursts are ignored."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)

    def add(self, value: float) -> None:
        """Take in a value; the oldest one goes."""
        self._values.append(value)

    def value(self) -> float:
        """Return the median; 0 without values."""
        return median(self._values) if self._values else 0.0

    def shrunk(self) -> float:
        """Return the median, drawn to 0 while it rests on less than half a window."""
        return self.value() * min(1.0, 2 * len(self._values) / WINDOW)


_SIZES = np.log2(np.arange(1, MAX_BUDGET + 2))
