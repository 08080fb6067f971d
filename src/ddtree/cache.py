"""The key/value cache: rows of tokens, appended to and cut in place.

Memory is linear in tokens. Every layer holds two buffers [rows, heads, tokens, head size] that grow by doubling.
A forward appends *pending* columns; `commit` keeps those of the accepted path, moved to the front, and forgets the
rest. Rows are packed: the rows in use are always 0..rows-1, and dropping one moves the last row into its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddtree.errors import CacheMemoryError
from ddtree.rows import drop_row

_FIRST_TOKENS = 256


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None where the platform does not tell."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


class KVCache:
    """Keys and values of R rows, passed to a transformers model as its cache.

    Attributes:
        lengths: committed tokens of each row in use.
        pending: columns appended since the last commit, the same for every row of the open window.
    """

    is_compileable = False

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: most columns a row may ever need, uncommitted ones included."""
        self.lengths: list[int] = []
        self.pending = 0
        self.max_tokens = max_tokens
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []
        self._row_capacity = 1
        self._token_capacity = min(_FIRST_TOKENS, max_tokens)
        self._window = (0, 0)
        self._fresh = 0

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def add_row(self) -> int:
        """Append an empty row and return its index."""
        self.lengths.append(0)
        return self.rows - 1

    @torch.inference_mode()
    def drop_row(self, row: int) -> None:
        """Free a row; the last row takes its index."""
        last = self.rows - 1
        if row != last:
            length = self.lengths[last]
            # A row that holds nothing yet may lie beyond the buffers, which grow when a row is first written.
            for buffer in self._buffers() if length else ():
                buffer[row, :, :length] = buffer[last, :, :length]
        drop_row(self.lengths, row)
        self.pending = 0

    def open(self, start: int, stop: int, columns: int) -> int:
        """Announce a forward of rows start..stop-1 with `columns` new columns each; returns the key length L.

        Raises:
            CacheMemoryError: the device cannot hold the grown cache.
        """
        if self.pending and self._window != (start, stop):
            raise RuntimeError("uncommitted columns of another window are pending")
        self._window = (start, stop)
        self._fresh = columns
        width = max(self.lengths[start:stop]) + self.pending + columns
        self._grow(self.rows, width)
        return width

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a layer's [R, H, n, D] and return views of its keys and values [R, H, L, D] (transformers' hook)."""
        while len(self._keys) <= layer_idx:
            self._keys.append(None)
            self._values.append(None)
        return self._append(self._keys, layer_idx, key), self._append(self._values, layer_idx, value)

    def advance(self) -> None:
        """The announced columns have been appended by every layer."""
        self.pending += self._fresh

    @torch.inference_mode()
    def commit(self, paths: list[list[int]]) -> None:
        """Keep the pending columns `paths[r]` of each row of the window, in that order, and drop the others.

        `paths[r]` is increasing. Columns already in place are not copied; the others are all read before any is
        written, and a column never moves backwards onto one still to be read.
        """
        start, stop = self._window
        for row, path in zip(range(start, stop), paths, strict=True):
            settled = next((i for i, column in enumerate(path) if i != column), len(path))
            base = self.lengths[row]
            if settled < len(path):
                source = torch.tensor(path[settled:], device=self._buffers()[0].device) + base
                for buffer in self._buffers():
                    buffer[row, :, base + settled : base + len(path)] = buffer[row].index_select(1, source)
            self.lengths[row] += len(path)
        self.pending = 0

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row after the first `length`."""
        self.lengths[row] = min(self.lengths[row], length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)

    def _append(self, buffers: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        start, stop = self._window
        buffer = buffers[layer]
        if buffer is None:
            shape = (self._row_capacity, states.shape[1], self._token_capacity, states.shape[3])
            buffer = buffers[layer] = self._zeros(shape, states.dtype, states.device)
        n = states.shape[2]
        lengths = self.lengths[start:stop]
        if min(lengths) == max(lengths):
            at = lengths[0] + self.pending
            buffer[start:stop, :, at : at + n] = states
        else:
            for index, length in enumerate(lengths):
                at = length + self.pending
                buffer[start + index, :, at : at + n] = states[index]
        return buffer[start:stop, :, : max(lengths) + self.pending + n]

    def _buffers(self) -> list[Tensor]:
        return [buffer for buffers in (self._keys, self._values) for buffer in buffers if buffer is not None]

    def _grow(self, rows: int, tokens: int) -> None:
        if rows <= self._row_capacity and tokens <= self._token_capacity:
            return
        row_capacity = self._row_capacity
        while row_capacity < rows:
            row_capacity *= 2
        token_capacity = self._token_capacity
        while token_capacity < tokens:
            token_capacity *= 2
        token_capacity = max(tokens, min(token_capacity, self.max_tokens))
        self._check_memory(row_capacity, token_capacity)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    shape = (row_capacity, old.shape[1], token_capacity, old.shape[3])
                    new = buffers[layer] = self._zeros(shape, old.dtype, old.device)
                    new[: old.shape[0], :, : old.shape[2]] = old
        self._row_capacity, self._token_capacity = row_capacity, token_capacity

    def _check_memory(self, rows: int, tokens: int) -> None:
        buffers = self._buffers()
        if not buffers:
            return
        need = sum(b.element_size() * rows * tokens * b.shape[1] * b.shape[3] for b in buffers)
        free = available_bytes(buffers[0].device)
        if free is not None and need > free:
            raise _no_memory(rows, tokens, need, free)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        # Hidden columns get weight 0, and 0 * NaN is NaN: the buffers must never hold garbage.
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise _no_memory(shape[0], shape[2], torch.Size(shape).numel() * dtype.itemsize, None) from error


def _no_memory(rows: int, tokens: int, need: int, free: int | None) -> CacheMemoryError:
    room = "" if free is None else f", {free / 2**20:.0f} MiB are free"
    return CacheMemoryError(
        f"the key/value cache for {rows} rows of {tokens} tokens needs {need / 2**20:.0f} MiB more{room}; "
        "use fewer sequences at once, a shorter prompt, or a smaller max_context"
    )
