"""A running average of a network's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Exponential moving average; early on it forgets faster, so that the initial weights do not linger.

    Args:
        net: the network.
        decay: share of the average that a step leaves, at most.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self._weights = list(net.parameters())
        self._decay = decay
        self._means = [weight.detach().clone() for weight in self._weights]
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 9))
        torch._foreach_lerp_(self._means, [weight.detach() for weight in self._weights], 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the average in the network's place inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> list[Tensor]:
        return [*self._means, torch.tensor(self._steps)]

    def load(self, state: list[Tensor]) -> None:
        *means, steps = state
        self._steps = int(steps)
        for mean, saved in zip(self._means, means, strict=True):
            mean.copy_(saved)

    def _swap(self) -> None:
        # The values, since a sharded weight's storage is not its own.
        for weight, mean in zip(self._weights, self._means, strict=True):
            own = weight.detach().clone()
            weight.detach().copy_(mean)
            mean.copy_(own)
