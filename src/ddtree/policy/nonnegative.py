"""Least squares with coefficients that are not negative (Lawson and Hanson, 1974, chapter 23)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def solve(matrix: Array, wanted: Array) -> Array:
    """The x >= 0 [n] that minimizes |matrix x - wanted|, for a matrix [m, n] and wanted values [m]."""
    count = matrix.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=bool)
    # Columns of one size make one tolerance serve all.
    sizes = np.linalg.norm(matrix, axis=0)
    sizes[sizes == 0] = 1
    scaled = matrix / sizes
    tolerance = 1e-10 * max(1e-300, float(np.linalg.norm(wanted)))
    for _ in range(3 * count):
        gain = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ solution))
        best = int(gain.argmax())
        if gain[best] <= tolerance:
            break
        free[best] = True
        solution = _settle(scaled, wanted, solution, free)
        if not free[best]:
            break
    return solution / sizes


def _settle(matrix: Array, wanted: Array, solution: Array, free: NDArray[np.bool_]) -> Array:
    """Least squares over the free columns, giving up (in `free`) those that would turn negative."""
    while free.any():
        trial = np.zeros_like(solution)
        trial[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
        falling = free & (trial <= 0)
        if not falling.any():
            return trial
        step = (solution[falling] / (solution[falling] - trial[falling] + 1e-300)).min()
        solution = solution + step * (trial - solution)
        gone = falling & (solution <= 1e-12 * solution.max())
        gone[np.flatnonzero(falling)[solution[falling].argmin()]] = True
        free &= ~gone
        solution[~free] = 0
    return np.zeros_like(solution)
