"""From a drafter's probabilities to observed acceptance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ConfigError
from ddtree.tree import MAX_DEPTH

_BINS_PER_NAT = 4
_BINS = 49  # down to a probability of e^-12; what is less likely shares the last bin
_PRIOR = 1.0  # accepted nodes that each bin is taken to have seen, all as predicted
_MEMORY = 4096.0
_EVERY = 16
_STEPS_PER_NAT = 32
_GRID = np.arange(_BINS * _STEPS_PER_NAT // _BINS_PER_NAT) / -_STEPS_PER_NAT


class Acceptance:
    """Maps the probability that a drafter gives a node to how often such nodes are accepted, for each depth.

    A bin of a depth holds how many nodes fell into it and how many were accepted; old ones fade. The estimate leans on
    the drafter's own probability until a bin should have seen some accepted, and is made monotone (pool adjacent
    violators), so that the likelier node stays the likelier one.

    Attributes:
        seen: nodes of all bins, faded ones included in part.
    """

    def __init__(self) -> None:
        # The first axis is the depth. Depth 0, the root, counts rounds: their number, drafted nodes, accepted ones.
        self._seen = np.zeros((MAX_DEPTH + 1, _BINS))
        self._predicted = np.zeros_like(self._seen)
        self._accepted = np.zeros_like(self._seen)
        self._learnt = tuple(np.zeros_like(self._seen) for _ in range(3))
        # Rounds not yet counted: many at once take hardly longer than one.
        self._waiting: list[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]] = []
        self._table = np.tile(np.exp(_GRID), (MAX_DEPTH + 1, 1))

    @property
    def seen(self) -> float:
        self._count()
        return float(self._seen[1:].sum())

    @property
    def rounds(self) -> float:
        """Rounds that were played, old ones in part."""
        return float(self._seen[0, 0])

    @property
    def tokens(self) -> float:
        """Mean tokens of those rounds: accepted nodes + 1."""
        return 1 + float(self._accepted[0, 0]) / max(self.rounds, 1.0)

    @property
    def nodes(self) -> float:
        """Mean drafted nodes of those rounds."""
        return float(self._predicted[0, 0]) / max(self.rounds, 1.0)

    def play(self, nodes: int, accepted: int) -> None:
        """A round was played: with so many drafted nodes, so many of them accepted."""
        for column, learnt, value in zip(self._columns, self._learnt, (1, nodes, accepted), strict=True):
            column[0, 0] += value
            learnt[0, 0] += value

    def calibrated(self, logprobs: NDArray[np.float32], depths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Probabilities [...] that nodes of these log-probabilities [...] and depths [...] are accepted."""
        places = np.clip(logprobs * -_STEPS_PER_NAT, 0, len(_GRID) - 1).astype(np.int64)
        return self._table[depths, places]

    def learn(
        self, logprobs: NDArray[np.float32], depths: NDArray[np.int64], accepted: NDArray[np.bool_]
    ) -> None:
        """Verified nodes [n] of depth 1 or more: what was predicted and what came."""
        self._waiting.append((logprobs, depths, accepted))
        if len(self._waiting) >= _EVERY:
            self._count()
            self._refresh()

    def add(self, other: Acceptance) -> None:
        """Count what the other has learnt since it was made or read."""
        self._count()
        other._count()
        for column, learnt in zip(self._columns, other._learnt, strict=True):
            column += learnt
        self._refresh()

    def as_list(self) -> list[list[float]]:
        """The counts as plain JSON values, for `from_list`: depth, bin, nodes seen, predicted and accepted ones; at
        depth 0 rounds played, nodes drafted and accepted in them."""
        self._count()
        return [
            [int(depth), int(at), *(round(float(column[depth, at]), 3) for column in self._columns)]
            for depth, at in np.argwhere(self._seen > 0)
        ]

    @staticmethod
    def from_list(rows: Any) -> Acceptance:
        """What `as_list` gave. Raises ConfigError when it is something else."""
        acceptance = Acceptance()
        try:
            for depth, at, seen, predicted, accepted in rows:
                sound = at == 0 if depth == 0 else 0 <= at < _BINS and accepted <= seen + 0.01
                if not (0 <= depth <= MAX_DEPTH and sound):
                    raise ValueError(f"a bin holds {[depth, at, seen, predicted, accepted]}")
                for column, value in zip(acceptance._columns, (seen, predicted, accepted), strict=True):
                    if not 0 <= value < float("inf"):
                        raise ValueError(f"a count is {value}")
                    column[depth, at] = value
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"the acceptance counts are damaged ({error}): delete them") from error
        acceptance._refresh()
        return acceptance

    @property
    def _columns(self) -> tuple[NDArray[np.float64], ...]:
        return self._seen, self._predicted, self._accepted

    def _count(self) -> None:
        """Count the nodes that wait for it."""
        if not self._waiting:
            return
        logprobs, depths, accepted = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        places = depths, _bins(logprobs)
        counts = np.ones(len(depths)), np.exp(logprobs.astype(np.float64)), accepted.astype(np.float64)
        for column, learnt, values in zip(self._columns, self._learnt, counts, strict=True):
            np.add.at(column, places, values)
            np.add.at(learnt, places, values)

    def _refresh(self) -> None:
        most = self._seen.max(axis=1, keepdims=True)
        fade = np.minimum(1.0, _MEMORY / np.maximum(most, 1.0))
        for column in self._columns:
            column *= fade
        centers = np.exp(-(np.arange(_BINS) + 0.5) / _BINS_PER_NAT)
        weights = self._seen + _PRIOR / centers
        observed = (self._accepted + _PRIOR) / weights
        predicted = (self._predicted + _PRIOR) / weights
        for depth in range(1, MAX_DEPTH + 1):
            # Bins run from likely to unlikely, and interpolation wants its knots ascending.
            steady = _descending(observed[depth], weights[depth])
            self._table[depth] = np.interp(_GRID, np.log(predicted[depth, ::-1]), np.log(steady[::-1]))
        np.exp(self._table[1:], out=self._table[1:])


def _bins(logprobs: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.clip(logprobs * -_BINS_PER_NAT, 0, _BINS - 1).astype(np.int64)


def _descending(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-increasing sequence nearest to the values in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] < value:
            above, heavier, members = pools.pop()
            value = (value * weight + above * heavier) / (weight + heavier)
            weight, count = weight + heavier, count + members
        pools.append((value, weight, count))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
