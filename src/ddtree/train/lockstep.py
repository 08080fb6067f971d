"""Rows in lockstep: many conversations at one position, so that a pass needs no mask, no padding, no list of lengths.

The engine's cache keeps a length for each row; here one number serves all, keys and values have their room from the
start, and nothing waits for the device. What enters the cache before the rows part is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddtree import attention
from ddtree.cache import available_bytes
from ddtree.errors import CacheMemoryError
from ddtree.target import Target

# cuDNN's attention is planned anew for each length of the keys, and here every step has another.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LockstepCache:
    """Keys and values of R rows of one length, passed to a transformers model as its cache.

    Args:
        rows: R.
        tokens: most tokens of a row.
        layers: the model's layers, which all count for the memory that is asked for.
        spare: bytes that must stay free beside the cache.
    """

    is_compileable = False

    def __init__(self, rows: int, tokens: int, layers: int, spare: int = 0) -> None:
        self.rows = rows
        self.length = 0
        self._tokens = tokens
        self._layers = layers
        self._spare = spare
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a layer's [R, H, n, D], or [1, H, n, D] for all rows; returns views [R or 1, H, length + n, D]."""
        if layer_idx == len(self._buffers):
            if layer_idx == 0:
                self._check_memory(key, value)
            self._buffers.append((self._room(key), self._room(value)))
        end = self.length + key.shape[2]
        keys, values = self._buffers[layer_idx]
        keys[: self.rows, :, self.length : end] = key
        values[: self.rows, :, self.length : end] = value
        return keys[: key.shape[0], :, :end], values[: key.shape[0], :, :end]

    def advance(self, tokens: int) -> None:
        """All layers have appended so many tokens."""
        self.length += tokens

    @torch.inference_mode()
    def move_rows(self, sources: Tensor, places: Tensor, rows: int) -> None:
        """Put rows `sources` into `places` (int64 [k] both), and keep the first `rows` rows."""
        for buffers in self._buffers:
            for buffer in buffers:
                filled = buffer[:, :, : self.length]
                filled[places] = filled[sources]
        self.rows = rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def _room(self, states: Tensor) -> Tensor:
        # Views end where the rows do, so what was never written is never read.
        shape = (self.rows, states.shape[1], self._tokens, states.shape[3])
        return torch.empty(shape, dtype=states.dtype, device=states.device)

    def _check_memory(self, key: Tensor, value: Tensor) -> None:
        per_token = sum(s.shape[1] * s.shape[3] * s.element_size() for s in (key, value)) * self._layers
        need = self.rows * self._tokens * per_token + self._spare
        free = available_bytes(key.device)
        if free is not None and need > free:
            fit = max(0, int(self.rows * free / need))
            raise CacheMemoryError(
                f"{self.rows} conversations of up to {self._tokens} tokens at once need {need / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free: lower --rows to {fit} or less"
            )


class Lockstep:
    """Runs the target over rows in lockstep.

    Args:
        target: the model.
        rows: rows at the start; they can only become fewer.
        tokens: most tokens of a row, the common beginning included.
    """

    def __init__(self, target: Target, rows: int, tokens: int) -> None:
        self.device = target.device
        self._target = target
        # Logits of all rows, and a copy of those that a choice is made from.
        spare = 2 * rows * target.vocab_size * target.dtype.itemsize
        self._cache = LockstepCache(rows, tokens, target.num_layers, spare)
        self._positions = torch.arange(tokens, device=target.device)[None]

    def begin(self, tokens: list[int]) -> Tensor:
        """Process what all rows begin with; logits [R, V] of the token after it (one row, seen R times)."""
        logits = self._forward(torch.tensor([tokens], device=self.device))
        return logits.expand(self._cache.rows, -1)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, int64 [R]; logits [R, V]."""
        return self._forward(tokens[:, None])

    def move_rows(self, sources: Tensor, places: Tensor, rows: int) -> None:
        """Rows `sources` take the `places` of rows no longer wanted, and the first `rows` rows stay."""
        self._cache.move_rows(sources, places, rows)

    def _forward(self, tokens: Tensor) -> Tensor:
        start, n = self._cache.length, tokens.shape[1]
        positions = self._positions[:, start : start + n]
        columns = self._positions[:, : start + n]
        visible = None if n == 1 else columns[:, None, :] <= positions[:, :, None]
        first = start == 0 and n > 1
        seen = attention.Visibility(
            visible, positions, columns, self._target.dtype, causal=first, steady=False
        )
        with _kernels(self.device):
            logits, _ = self._target.run(self._cache, tokens, positions, seen, keep=1)
        self._cache.advance(n)
        return logits[:, -1]


@contextmanager
def _kernels(device: torch.device) -> Iterator[None]:
    with sdpa_kernel(_KERNELS) if device.type == "cuda" else nullcontext():
        yield
