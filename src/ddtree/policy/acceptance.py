"""Calibrates a drafter's probabilities by how often its nodes were accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ConfigError
from ddtree.tree import MAX_DEPTH

# Bins of probability: 4 for each factor of e, 49 in all, down to e^-12; less likely nodes share the last one. Reasoned:
# half as many to a factor blur 0.6 and 1; twice as many fill half as soon. Files hold bins by number, so that other
# values make them worthless.
BINS_PER_NAT = 4
BINS = 49
# Accepted nodes, as predicted, that each bin starts with. Half: few nodes move a bin; double: calibration comes later.
PRIOR = 1.0
# Nodes that the fullest bin of a depth looks back: half forgets sooner, double later.
MEMORY = 4096.0
# Calls of `learn` between two tables: half costs twice the time of it (1.5 ms a table); double loses 0.2 % where an
# H200 drafts with one that promises three times what it keeps (simulated), and changes the replay by -0.1 to 0.7 %.
REFRESH_EVERY = 16
# Logarithms of the probabilities that are tabulated. Reasoned: at half as many a probability is off by 3 % and not 1.5;
# double takes twice as long to refresh.
_STEPS_PER_NAT = 32
_GRID = np.arange(BINS * _STEPS_PER_NAT // BINS_PER_NAT) / -_STEPS_PER_NAT


class Acceptance:
    """Maps the probability that a drafter gives a node to how often such nodes are accepted, for each depth.

    A bin of a depth holds how many nodes fell into it and how many were accepted; old ones fade. The estimate leans on
    the drafter's own probability until a bin should have seen some accepted, and is made monotone (isotonic
    regression), so that the likelier node stays the likelier one.
    """

    def __init__(self) -> None:
        # Nodes seen, predicted and accepted [3, depths, bins]. Files may hold figures of rounds at depth 0, which are
        # passed on as they are.
        self._counts = np.zeros((3, MAX_DEPTH + 1, BINS))
        self._learnt = np.zeros_like(self._counts)
        self._table = np.tile(np.exp(_GRID), (MAX_DEPTH + 1, 1))
        self._since = 0

    @property
    def seen(self) -> float:
        """Nodes of all bins, old ones in part."""
        return float(self._counts[0, 1:].sum())

    def calibrated(self, logprobs: NDArray[np.float32], depths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return probabilities [...] that nodes of these log-probabilities [...] and depths [...] are accepted."""
        places = np.clip(logprobs * -_STEPS_PER_NAT, 0, len(_GRID) - 1).astype(np.int64)
        return self._table[depths, places]

    def learn(
        self, logprobs: NDArray[np.float32], depths: NDArray[np.int64], accepted: NDArray[np.bool_]
    ) -> None:
        """Count verified nodes [n] of depth 1 or more: what was predicted, and whether they were accepted."""
        bins = np.clip(logprobs * -BINS_PER_NAT, 0, BINS - 1).astype(np.int64)
        values = np.stack([np.ones(len(bins)), np.exp(logprobs), accepted])
        for counts in (self._counts, self._learnt):
            np.add.at(counts, (np.arange(3)[:, None], depths, bins), values)
        self._since += 1
        if self._since >= REFRESH_EVERY:
            self._refresh()

    def add(self, other: Acceptance) -> None:
        """Count what the other has learnt since it was made or read."""
        self._counts += other._learnt
        self._refresh()

    def as_list(self) -> list[list[float]]:
        """Return the counts as plain JSON values: depth, bin, nodes seen, predicted and accepted ones."""
        places = np.argwhere(self._counts[0] > 0).tolist()
        return [[depth, at, *self._counts[:, depth, at].round(3).tolist()] for depth, at in places]

    @staticmethod
    def from_list(rows: Any) -> Acceptance:
        """Return what `as_list` gave. Raises ConfigError when it is something else."""
        acceptance = Acceptance()
        try:
            for depth, at, *counts in rows:
                seen, _, accepted = counts
                sound = at == 0 if depth == 0 else accepted <= seen + 0.01
                if not (sound and min(depth, at, *counts) >= 0 and np.isfinite(counts).all()):
                    raise ValueError(f"a bin holds {[depth, at, *counts]}")
                acceptance._counts[:, depth, at] = counts
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"the acceptance counts are damaged ({error}): delete them") from error
        acceptance._refresh()
        return acceptance

    def _refresh(self) -> None:
        """Let old counts fade, and make the table of probabilities anew."""
        self._since = 0
        self._counts *= np.minimum(1.0, MEMORY / self._counts[0].max(axis=1, initial=1.0))[:, None]
        centers = np.exp(-(np.arange(BINS) + 0.5) / BINS_PER_NAT)
        weights = self._counts[0] + PRIOR / centers
        predicted, observed = (self._counts[1:] + PRIOR) / weights
        steady = _descending(observed, weights)
        for depth in range(1, MAX_DEPTH + 1):
            # Bins run from likely to unlikely, and interpolation wants its knots ascending.
            knots = np.log(predicted[depth, ::-1])
            self._table[depth] = np.exp(np.interp(_GRID, knots, np.log(steady[depth, ::-1])))


def _descending(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-increasing sequences [D, n] nearest to the values [D, n] in weighted squares.

    That is isotonic regression by its min-max formula: of the means from each start at or before a place, each to the
    end at or behind it that makes it greatest, the least.
    """
    spans = np.triu(np.ones((values.shape[1], values.shape[1])))
    with np.errstate(invalid="ignore"):  # 0 / 0 where the end is before the start
        means = (spans * (values * weights)[:, None]).cumsum(axis=2) / (spans * weights[:, None]).cumsum(
            axis=2
        )
    greatest = np.fmax.accumulate(means[:, :, ::-1], axis=2)[:, :, ::-1]
    return np.minimum.accumulate(greatest, axis=1).diagonal(axis1=1, axis2=2)
