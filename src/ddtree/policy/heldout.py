"""How well a latency model predicts what it was not fitted to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ddtree.policy.curve import Sample, medians
from ddtree.policy.latency import LatencyModel

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class HeldOut:
    """Errors of predicted against measured verification.

    Attributes:
        widths: the node counts that were left out of the fit, at every context.
        contexts: the contexts that were left out of the fit, at every node count.
        errors: |predicted / measured - 1| at each point left out.
    """

    widths: tuple[int, ...]
    contexts: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def worst(self) -> float:
        return max(self.errors)


def held_out(samples: Iterable[Sample], every: int = 3) -> HeldOut | None:
    """Fit without every third node count and every third context, and predict them.

    The least and the largest are kept: this measures interpolation. None when there are too few of both.
    """
    points = medians(samples)
    widths = _inner(sorted({point.width for point in points if point.width > 1}), every)
    contexts = _inner(sorted({point.context for point in points}), every)
    unseen = [point for point in points if point.width in widths or point.context in contexts]
    if not unseen:
        return None
    model = LatencyModel.fit([point for point in points if point not in unseen], {}, machine={})
    errors = [abs(model.verify(p.width, p.rows, p.context) / p.seconds - 1) for p in unseen]
    return HeldOut(tuple(widths), tuple(contexts), tuple(errors))


def _inner(values: list[Number], every: int) -> list[Number]:
    return values[1:-1][::every]
