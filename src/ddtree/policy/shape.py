"""How passes of different sizes compare with each other, learnt from neighbouring rounds."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ddtree.tree import MAX_BUDGET

_STEPS = 12  # differences between two sizes that are looked at
_LEAST = 4  # of them, before they count
_LEAST_SLOPE = 0.5  # of the measured one: wide trees tried in vain cost more than those not tried yet
_NOISE = 0.05  # of a pass: a smaller difference says little of what a node costs
_DOUBT = 1.0  # differences that the first measurement is worth
_SIZES = np.log2(np.arange(1, MAX_BUDGET + 2))  # of passes of 1, 2, ... nodes a row


class Shape:
    """Corrections to the cost of passes against each other, whatever the machine's pace.

    A first measurement on a busy machine can have nodes far too dear or too cheap. `Drift` cannot tell: it follows the
    sizes in use. Two rounds next to each other ran at about the same pace, so that what measured / predicted differs
    by between them is owed to their sizes, where most such pairs agree. Sizes are told apart by powers of two, and lie
    between their neighbours.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._steps: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_STEPS))
        self._known: NDArray[np.float64] = np.zeros(0)  # sizes as powers of two
        self._logs: NDArray[np.float64] = np.zeros(0)  # the logarithm of each one's correction

    def observe(self, width: int, ratio: float) -> bool:
        """A pass of so many nodes a row took `ratio` times what was first measured; returns whether that told anything.

        Ratios that are no positive numbers are passed over.
        """
        if not 0 < ratio < math.inf:
            return False
        before, self._last = self._last, (round(math.log2(width)), math.log(ratio))
        if before is None or before[0] == self._last[0]:
            return False
        (low, smaller), (high, larger) = sorted((before, self._last))
        self._steps[low, high].append(larger - smaller)
        if len(self._steps[low, high]) < _LEAST:
            return False
        self._solve()
        return True

    def correct(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of passes of 1, 2, ... nodes a row, as first measured, with the corrections; they never fall.

        Beyond the largest size that is known, a node is as much cheaper or dearer than measured as just before it; no
        less than half as dear, since two small passes differ by little and their difference is uncertain.
        """
        if not len(self._known):
            return seconds
        sizes = _SIZES[: len(seconds)]
        corrected = np.maximum.accumulate(seconds * np.exp(np.interp(sizes, self._known, self._logs)))
        before, last = (min(round(2**size), len(seconds)) - 1 for size in self._known[-2:])
        measured = seconds[last] - seconds[before]
        # The ratio of two differences as small as their noise would be anything; what is wanting is a part of the pass.
        wanting = max(0.0, _NOISE * seconds[last] - measured)
        rise = corrected[last] - corrected[before] + wanting * corrected[last] / seconds[last]
        slope = max(_LEAST_SLOPE, rise / (measured + wanting))
        corrected[last:] = corrected[last] + slope * (seconds[last:] - seconds[last])
        return corrected

    def _solve(self) -> None:
        """The corrections that agree best with all differences, and are no larger than these ask for."""
        counted = {pair: steps for pair, steps in self._steps.items() if len(steps) >= _LEAST}
        known = sorted({size for pair in counted for size in pair})
        places = {size: place for place, size in enumerate(known)}
        matrix, right = _DOUBT * np.eye(len(known)), np.zeros(len(known))
        for (low, high), steps in counted.items():
            difference = np.zeros(len(known))
            difference[places[low]], difference[places[high]] = -1.0, 1.0
            matrix += len(steps) * np.outer(difference, difference)
            right += len(steps) * _sure(steps) * difference
        self._known = np.array(known, dtype=np.float64)
        self._logs = np.linalg.solve(matrix, right).astype(np.float64)


def _sure(steps: Iterable[float]) -> float:
    """What three quarters of some differences agree on: the quartile nearer to zero, or nothing where they disagree."""
    low, high = np.quantile(np.fromiter(steps, np.float64), (0.25, 0.75))
    return float(max(low, 0.0) + min(high, 0.0))
