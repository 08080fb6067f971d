"""How far a fit is, and what follows from it: the learning rate, and when to stop."""

from __future__ import annotations

import math
import time

_WARMUP = 0.04


def learning_rate(fraction: float, highest: float) -> float:
    """Linear warm-up over the first 4 % of a fit, then a cosine down to zero; `fraction` of it is done."""
    if fraction < _WARMUP:
        return highest * fraction / _WARMUP
    return highest * (0.5 + 0.5 * math.cos(math.pi * min(1.0, (fraction - _WARMUP) / (1 - _WARMUP))))


class Clock:
    """Share of a fit that is done: by steps, or by time when it has so many minutes.

    Args:
        steps: of the whole fit; not read when there are `minutes`.
        minutes: of the whole fit, or None.

    Attributes:
        before: seconds that the fit had used when it was taken up again.
    """

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.before = 0.0
        self._steps = steps
        self._minutes = minutes
        self._started = time.monotonic()

    def start(self, before: float) -> None:
        """Begin to count, with the seconds of an earlier part of the fit."""
        self.before, self._started = before, time.monotonic()

    @property
    def seconds(self) -> float:
        """Used so far."""
        return self.before + time.monotonic() - self._started

    def fraction(self, step: int) -> float:
        """Share that is done when `step` steps are; a step's own rate is that of its middle."""
        if self._minutes is not None:
            return self.seconds / (60 * self._minutes)
        return (step + 0.5) / self._steps

    def over(self, step: int) -> bool:
        return self.seconds >= 60 * self._minutes if self._minutes is not None else step >= self._steps

    def left(self, step: int) -> float:
        """Seconds to go, as far as can be told."""
        if self._minutes is not None:
            return max(0.0, 60 * self._minutes - self.seconds)
        return self.seconds / max(1, step) * (self._steps - step)
