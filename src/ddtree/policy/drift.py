"""How much slower or faster a machine is now than when it was measured."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW = 25
_FIRST = 5


class Drift:
    """A factor on predictions: the median of the last `WINDOW` measured / predicted.

    Half a window of rounds must agree before the factor moves, so that bursts pass it by and what lasts does not.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def observe(self, predicted: float, measured: float) -> None:
        """`predicted` was made with the present factor. Values that are no positive numbers are passed over."""
        if not (0 < predicted < math.inf and 0 < measured < math.inf):
            return
        self._ratios.append(measured / predicted * self.factor)
        if len(self._ratios) >= _FIRST:
            self.factor = median(self._ratios)
