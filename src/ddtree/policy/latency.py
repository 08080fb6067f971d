"""Seconds of the parts of a round on one machine: a table that is measured once and that rounds keep up to date."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import groupby
from statistics import median, median_low
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
# Rounds for which a width's correction counts as recent: older ones must not contradict it. Half: a rare arm's round is
# not recent by its next one; double: a burst on a rare width lifts the curve for as much longer.
RECENT = 64
# Tokens of context over which one interpolated curve serves: half, twice the curves; double, a coarser context.
CONTEXT_STEP = 64
# Share of a plain pass that the rest of a round takes until the first round has shown it; then it counts for nothing,
# so that half or double change a few rounds alone.
OVERHEAD = 0.03

_WIDTHS = np.arange(1.0, MAX_BUDGET + 2)
_SIZES = np.log2(_WIDTHS)


@dataclass(frozen=True, order=True)
class Sample:
    """One measurement.

    Attributes:
        width: nodes a row, root included, e.g. 17; trees of a batch are padded to the widest.
        rows: rows of the batch.
        context: mean committed tokens a row.
        seconds: the time it took.

    Raises:
        ConfigError: it is impossible.
    """

    width: int
    rows: int
    context: float
    seconds: float

    def __post_init__(self) -> None:
        timed = math.isfinite(self.seconds) and self.seconds > 0
        if not (timed and self.width >= 1 and self.rows >= 1 and self.context >= 0):
            raise ConfigError(f"{self} is no measurement: run ddtree calibrate")


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
        points: the medians of verification, by width, rows and context.
        draft_points: the medians of drafting, by name.

    Raises:
        ConfigError: there is no measurement of verification or of a drafter.
    """

    def __init__(
        self, verify: Iterable[Sample], draft: Mapping[str, Iterable[Sample]], *, machine: Mapping[str, Any]
    ) -> None:
        self.machine = dict(machine)
        self.points = _medians(verify)
        self.draft_points = {name: _medians(own) for name, own in draft.items()}
        if not (self.points and all(self.draft_points.values())):
            raise ConfigError("a list of measurements is empty: run ddtree calibrate")
        average = bool(machine.get(CUT_SHORT))
        self._verify = _Curves(self.points, average)
        self._draft = {name: _Curves(own, average) for name, own in self.draft_points.items()}
        # Each is a rolling window of logarithms of measured over predicted time, but for the overhead's seconds.
        self._pace = _window()
        self._cells: defaultdict[tuple[int, int], deque[float]] = defaultdict(_window)
        self._seen: dict[tuple[int, int], int] = {}
        self._rounds = 0
        self._corrected: tuple[tuple[int, float], Array] | None = None
        self._last: tuple[tuple[int, int], float] | None = None
        self._draft_pace: dict[tuple[frozenset[str], bool], deque[float]] = {}
        self._overhead = _window()

    def verify(self, nodes: int, rows: int = 1, context: float = 0.0) -> float:
        """Return the seconds of verifying `nodes` nodes a row besides the root."""
        return float(self.verify_up_to(nodes, rows, context)[nodes])

    def verify_up_to(self, nodes: int, rows: int = 1, context: float = 0.0) -> Array:
        """Return the seconds [nodes + 1] of verifying 0..`nodes` nodes a row besides the root; they never fall."""
        # A round asks for several arms, of which each would work the same curve out again.
        if self._corrected is None or self._corrected[0] != (rows, context):
            self._corrected = (rows, context), self._correct(rows, context)
        return self._corrected[1][: nodes + 1]

    def _correct(self, rows: int, context: float) -> Array:
        seconds = self._verify.seconds(rows, context)
        mine = [cell for cell in sorted(self._cells) if cell[0] == batch_class(rows)]
        if mine:
            known = self._consistent(mine, seconds)
            corrections = np.interp(_SIZES, [size for _, size in mine], known)
            seconds = np.maximum.accumulate(seconds * np.exp(corrections))
        return seconds * math.exp(_center(self._pace))

    def draft(
        self, names: Sequence[str], nodes: int, rows: int = 1, context: float = 0.0, sampled: bool = False
    ) -> float:
        """Return the seconds of drafting `nodes` nodes a row by the named drafters and building the tree.

        Raises:
            ConfigError: a drafter was not measured.
        """
        if missing := [name for name in names if name not in self._draft]:
            raise ConfigError(f"drafting with {missing[0]!r} was not measured: run ddtree calibrate with it")
        total = sum(float(self._draft[name].seconds(rows, context)[nodes]) for name in names)
        return total * math.exp(_center(self._draft_pace.get((frozenset(names), sampled), self._pace)))

    def overhead(self) -> float:
        """Return the seconds of a round outside drafting and verification."""
        return _center(self._overhead) or OVERHEAD * self.verify(0)

    def round_seconds(
        self, names: Sequence[str], nodes: int, rows: int = 1, context: float = 0.0, sampled: bool = False
    ) -> Array:
        """Return the seconds [nodes + 1] of rounds that verify 0..`nodes` nodes a row, drafted by `names` (or none)."""
        draft = self.draft(names, nodes, rows, context, sampled)
        return self.verify_up_to(nodes, rows, context) + draft + self.overhead()

    def observe_verify(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """Learn that verifying `nodes` nodes a row besides the root took so long; impossible times are ignored."""
        if 0 < seconds < math.inf:
            ratio = math.log(seconds / float(self._verify.seconds(rows, context)[nodes]))
            cell = batch_class(rows), round(math.log2(nodes + 1))
            # Neighbouring rounds ran at about the same pace, so a difference of their ratios is owed to their cells.
            before, self._last = self._last, (cell, ratio)
            if before is not None and before[0] != cell:
                other, difference = before[0], ratio - before[1]
                own, others = difference + self._correction(other), self._correction(cell) - difference
                self._cells[cell].append(own)
                self._cells[other].append(others)
            self._rounds += 1
            self._corrected = None
            self._seen[cell] = self._rounds
            self._pace.append(ratio - self._correction(cell))

    def observe_draft(
        self, names: Sequence[str], nodes: int, rows: int, context: float, sampled: bool, seconds: float
    ) -> None:
        """Learn that the named drafters took so long; impossible times are ignored."""
        if 0 < seconds < math.inf:
            predicted = self.draft(names, nodes, rows, context, sampled)
            key = frozenset(names), sampled
            ratio = math.log(seconds / predicted) + _center(self._draft_pace.get(key, self._pace))
            self._draft_pace.setdefault(key, _window()).append(ratio)

    def observe_overhead(self, seconds: float) -> None:
        """Learn that the rest of a round took so long; impossible times are ignored."""
        if 0 < seconds < math.inf:
            self._overhead.append(seconds)

    def _correction(self, cell: tuple[int, int]) -> float:
        """Return a cell's correction, drawn to 0 while it rests on less than half a window."""
        values = self._cells.get(cell, _window())
        return _center(values) * min(1.0, 2 * len(values) / WINDOW)

    def _consistent(self, cells: Sequence[tuple[int, int]], measured: Array) -> list[float]:
        """Return the corrections of cells, the narrowest first; old ones make no width dearer than recent, wider ones.

        A burst that met the last rounds of a rare width would otherwise lift all that is wider, for good.
        """
        found, bound = [], math.inf
        for cell in reversed(cells):
            correction, before = self._correction(cell), math.log(measured[2 ** cell[1] - 1])
            if self._rounds - self._seen[cell] <= RECENT:
                bound = min(bound, before + correction)
            found.append(min(correction, bound - before))
        return found[::-1]

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


def batch_class(rows: int) -> int:
    """Return the next power of two: batches of 1, 2, 3-4, 5-8, ... rows are told apart."""
    return 1 << (rows - 1).bit_length()


class _Curves:
    """Measured seconds by batch size: linear between widths and in the context, and beyond the widest.

    A batch size that was not measured costs what the nearest one does for as many tokens. Beyond the widest tree, a
    node costs what the last ones did, or `average` of all where few were measured.
    """

    def __init__(self, points: Sequence[Sample], average: bool) -> None:
        self._points = points
        self._average = average
        self._at = lru_cache(maxsize=256)(self._interpolate)

    def seconds(self, rows: int, context: float) -> Array:
        """Return the seconds [MAX_BUDGET + 1] of 1..MAX_BUDGET + 1 nodes, at a context rounded to 64 tokens."""
        return self._at(rows, int(context) // CONTEXT_STEP)

    def _interpolate(self, rows: int, step: int) -> Array:
        nearest = min({p.rows for p in self._points}, key=lambda known: (abs(math.log(known / rows)), known))
        widths, at_zero, slopes = _curve([point for point in self._points if point.rows == nearest])
        seconds = at_zero + slopes * (step + 0.5) * CONTEXT_STEP
        slope = (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2]) if len(widths) > 1 else 0.0
        if self._average:
            slope = max(slope, seconds[-1] / widths[-1])
        wanted = _WIDTHS * rows / nearest
        return np.interp(wanted, widths, seconds) + slope * np.maximum(0.0, wanted - widths[-1])


def _curve(points: Sequence[Sample]) -> tuple[Array, Array, Array]:
    """Return widths, seconds without context, and seconds by token of context; both never fall with the width."""
    groups = [list(own) for _, own in groupby(points, key=lambda point: point.width)]
    widths, _, contexts, seconds = np.array([np.mean([astuple(p) for p in own], axis=0) for own in groups]).T
    # Widths that were measured at one context alone take their slope from their neighbours.
    lines = {
        own[0].width: np.polyfit([p.context for p in own], [p.seconds for p in own], 1)[0]
        for own in groups
        if len(own) > 1
    } or {1: 0.0}
    slopes = np.interp(widths, list(lines), np.maximum.accumulate([0.0, *lines.values()])[1:])
    # Noise may make the context look dearer than the whole: a tenth of the pass is left for the rest.
    return widths, np.maximum.accumulate(np.maximum(seconds - slopes * contexts, seconds / 10)), slopes


def _medians(samples: Iterable[Sample]) -> list[Sample]:
    """Return one sample for each (width, rows, context), with the median of its seconds, in this order."""
    found: defaultdict[tuple[int, int, float], list[float]] = defaultdict(list)
    for sample in samples:
        found[sample.width, sample.rows, sample.context].append(sample.seconds)
    # The lower of two: the first measurement of a point may have had something to set up.
    return [Sample(*point, median_low(seconds)) for point, seconds in sorted(found.items())]


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)


def _center(values: deque[float]) -> float:
    """Return the median: half of the values must agree, so single bursts are ignored; 0 without values."""
    return median(values) if values else 0.0
