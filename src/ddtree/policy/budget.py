"""How many nodes a round pays for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def gains(probabilities: Array) -> Array:
    """Expected tokens of a round by width: all rows take their first nodes.

    Rows of a batch are padded to the widest, so that a node of one row makes room for a node of each. Hence what
    competes for the shared budget is widths: each is worth the sum of the nodes that fill it.

    Args:
        probabilities: float [R, n], that a node is accepted, in the tree's order; 0 where a row has none.

    Returns:
        float [n + 1]: expected tokens of all rows with 0..n nodes each besides the root.
    """
    rows, nodes = probabilities.shape
    expected = np.empty(nodes + 1)
    expected[0] = rows
    np.cumsum(probabilities.sum(axis=0), out=expected[1:])
    expected[1:] += rows
    return expected


def best_width(expected: Array, seconds: Array, rate: float | None = None) -> int:
    """The number of nodes a row that serves throughput best.

    A round's worth is its tokens less what its time would have earned at the going rate: rounds chosen so have the
    most tokens per second in the long run (Dinkelbach's rule for a ratio of sums). Without a rate, the round's own
    ratio is maximized, which is the rule of CaDDTree (arXiv 2606.01813) and BASTION (arXiv 2605.29727): it stops
    somewhat early in lucky rounds and late in others. Both are evaluated at every width, so that neither descending
    probabilities nor a convex curve is needed for the optimum.

    Args:
        expected: float [n + 1], tokens of a round with 0..n nodes; see `gains`.
        seconds: float [n + 1], of the whole round with as many.
        rate: tokens per second that such rounds have made lately; None when unknown.

    Returns:
        0..n; the smallest of equals.
    """
    worth = expected / seconds if rate is None else expected - rate * seconds
    return int(worth.argmax())
