"""Scores as whole numbers, so that sums and comparisons are exact.

The cost of a prefix is its negated log-probability in units of 2^-32, an int64. A float32 log-probability of 2^-8 or
more is a whole number of these units, and sums are exact in any order, so trees come out the same on every device
and whatever way they are found. What costs 2^42 or more (a probability below e^-1024) counts as absent.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNIT = 2.0**-32
ABSENT = 1 << 42
_LEAST = -ABSENT * UNIT


def costs_of(logprobs: Tensor) -> Tensor:
    """int64 costs of log-probabilities; those above 0 count as 0, NaN and -inf as absent."""
    kept = logprobs.float().nan_to_num(nan=_LEAST, posinf=0.0, neginf=_LEAST).clamp(_LEAST, 0)
    return (kept * (-1 / UNIT)).to(torch.int64)


def array_costs_of(logprobs: NDArray[np.float32]) -> NDArray[np.int64]:
    """As `costs_of`, for an array."""
    kept = np.minimum(np.fmax(logprobs, np.float32(_LEAST)), np.float32(0))
    kept *= np.float32(-1 / UNIT)
    return kept.astype(np.int64)


def logprobs_of(costs: Tensor) -> Tensor:
    """float32 log-probabilities of costs; -inf of absent ones."""
    return (costs.to(torch.float32) * -UNIT).masked_fill(costs >= ABSENT, float("-inf"))


def cheapest(costs: Tensor, count: int) -> Tensor:
    """int64 [R, count]: where the `count` lowest of the costs [R, n <= 2^20] stand, in order; ties by index."""
    indices = torch.arange(costs.shape[1], device=costs.device)
    # Cost and index in one integer are never tied, so the choice is the same on every device.
    keys = (costs.clamp(max=ABSENT) << 20) + indices
    return keys.topk(count, largest=False).values & 0xFFFFF
