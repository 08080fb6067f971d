"""The target's features of whole texts, computed when they are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddtree.cache import KVCache
from ddtree.target import Target
from ddtree.train.group import Group
from ddtree.train.record import Recorder

_PASS_TOKENS = 65_536


class Teacher:
    """Runs the frozen target over padded batches of texts.

    Args:
        target: the target.
        layers: its feature layers.
        group: the processes that compute features at once, each of its own texts.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], group: Group | None = None) -> None:
        self._target = target
        self._layers = layers
        self._group = group or Group()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Features [C, n, F + 1, H] of tokens int64 [C, n], on the target's device and in its dtype.

        Texts are padded at their end and attention is causal: padding changes nothing before it.
        """
        rows = max(1, _PASS_TOKENS // tokens.shape[1])
        texts = tokens.split(rows)
        # Layers of a sharded target run in all processes or in none.
        most = self._group.most(len(texts), tokens.device) if self._group.sharded else len(texts)
        found = [self._pass(part) for part in texts]
        for _ in range(len(texts), most):
            self._pass(tokens[:1, :1])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _pass(self, tokens: Tensor) -> Tensor:
        cache = _Unkept(len(tokens))
        depths = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with Recorder(self._target, self._layers) as recorder:
            self._target.extend(cache, tokens, depths, None, keep=1)
            return recorder.take()


class _Unkept(KVCache):
    """The cache of a single pass, after which nothing is read again."""

    def __init__(self, rows: int) -> None:
        super().__init__(0)
        self.lengths = [0] * rows

    def open(self, start: int, stop: int, columns: int) -> int:
        return columns

    def advance(self) -> None:
        pass

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value
