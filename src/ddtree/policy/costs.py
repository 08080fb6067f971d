"""A latency model as rounds read it: tables looked up, because it is asked several times a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.policy.latency import LatencyModel
from ddtree.policy.shape import Shape
from ddtree.tree import MAX_BUDGET

_STEP = 64  # tokens of context over which time hardly changes
_MOST = 256
SAMPLED = "sampled"


class Costs:
    """Predicted seconds of rounds, at contexts rounded to 64 tokens, as rounds have corrected them.

    Args:
        latency: the model; its drift is followed.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        self._verify: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._corrected: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._shapes: dict[int, Shape] = {}
        self._draft: dict[tuple[frozenset[str], int, int, int], float] = {}

    def verify(self, nodes: int, rows: int, context: float) -> float:
        """Of verifying `nodes` nodes a row besides the root."""
        return float(self._table(rows, context)[nodes] * self._latency.factor("verify"))

    def verified(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """Verifying `nodes` nodes a row besides the root took so long."""
        self._latency.observe("verify", self.verify(nodes, rows, context), seconds)
        shape = self._shapes.setdefault(rows, Shape())
        if shape.observe(nodes + 1, seconds / float(self._measured(rows, context)[nodes])):
            self._corrected.clear()

    def rounds(
        self, nodes: int, rows: int, context: float, names: Sequence[str], sampled: bool
    ) -> NDArray[np.float64]:
        """[nodes + 1]: of whole rounds that verify 0..`nodes` nodes a row, out of as many drafted by these drafters."""
        verify = self._table(rows, context)[: nodes + 1] * self._latency.factor("verify")
        return verify + self.draft(nodes, rows, context, names, sampled) + self._latency.overhead()

    def round(self, nodes: int, rows: int, context: float, names: Sequence[str], sampled: bool) -> float:
        """Of a whole round that drafts and verifies so many nodes a row; without drafters the root alone."""
        drafted = self.draft(nodes, rows, context, names, sampled) if names else 0.0
        return self.verify(nodes, rows, context) + drafted + self._latency.overhead()

    def draft(self, nodes: int, rows: int, context: float, names: Sequence[str], sampled: bool) -> float:
        """Of drafting so many nodes a row, and building the tree; a sampled row's noise takes time of its own."""
        whole = frozenset(names)
        key = (whole, -(-nodes // 8), rows, int(context) // _STEP)
        if key not in self._draft:
            _limit(self._draft)
            width = 1 + 8 * key[1]
            seconds = self._latency.draft(names, width, rows, (key[3] + 0.5) * _STEP)
            self._draft[key] = seconds / self._latency.factor("draft", names)
        return self._draft[key] * self._latency.factor("draft", marked(names, sampled))

    def _table(self, rows: int, context: float) -> NDArray[np.float64]:
        """[MAX_BUDGET + 1]: of verifying, but for drift; never less for more nodes."""
        key = (rows, int(context) // _STEP)
        if key not in self._corrected:
            _limit(self._corrected)
            measured, shape = self._measured(rows, context), self._shapes.get(rows)
            self._corrected[key] = shape.correct(measured) if shape else measured
        return self._corrected[key]

    def _measured(self, rows: int, context: float) -> NDArray[np.float64]:
        """[MAX_BUDGET + 1]: of verifying, as it was first measured."""
        key = (rows, int(context) // _STEP)
        if key not in self._verify:
            _limit(self._verify)
            table = self._latency.curve(MAX_BUDGET + 1, rows, (key[1] + 0.5) * _STEP)
            self._verify[key] = table / self._latency.factor("verify")
        return self._verify[key]


def marked(names: Sequence[str], sampled: bool) -> list[str]:
    """Drafters' names as drift is followed for them."""
    return [*names, SAMPLED] if sampled else list(names)


def _limit(cache: dict[Any, Any]) -> None:
    if len(cache) >= _MOST:
        cache.clear()
