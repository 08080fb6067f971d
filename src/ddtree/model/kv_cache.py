"""The key/value cache: rows of tokens, appended to and cut in place.

Memory is linear in tokens. Every layer has two buffers [rows, heads, tokens, head size] that grow by doubling; those
of one shape lie in one stack, so that moving columns is one operation for all layers. A forward appends *pending*
columns; `commit` keeps those of the accepted path, moved to the front, and forgets the rest. Rows are packed: the rows
in use are always 0..rows-1, and dropping one moves the last row into its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import CacheMemoryError


def drop_row(states: list[Any], row: int) -> None:
    """Remove the state of a row from a list with one entry for each; the last entry moves into its place."""
    last = states.pop()
    if row < len(states):
        states[row] = last


_FIRST_TOKENS = 256

Kind = tuple[int, int, torch.dtype]
Columns = list[tuple[Tensor, Tensor]]
"""Keys and values of some tokens of one row, layer by layer, [H, n, D]."""


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


def out_of_memory(device: torch.device) -> CacheMemoryError:
    """What to tell a user of a `torch.OutOfMemoryError`."""
    return CacheMemoryError(
        f"{device} ran out of memory: use fewer sequences at once, shorter prompts, a smaller budget or a smaller dtype"
    )


class KVCache:
    """Keys and values of R rows, passed to a transformers model as its cache.

    Attributes:
        lengths: committed tokens of each row in use.
        pending: columns appended since the last commit, the same for every row of the open window.
        version: changes whenever the buffers do.
    """

    is_compileable = False

    def __init__(self, max_tokens: int, layers: int = 1) -> None:
        """`max_tokens`: most columns a row may ever need, uncommitted ones included; `layers`: how many to expect."""
        self.lengths: list[int] = []
        self.pending = 0
        self.max_tokens = max_tokens
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []
        self._stacks: list[Tensor] = []
        self._layers = layers
        self._free: dict[Kind, list[Tensor]] = {}
        self._row_capacity = 1
        self._token_capacity = min(_FIRST_TOKENS, max_tokens)
        self._window = (0, 0)
        self._fresh = 0
        self._scatter: tuple[Tensor, int] | None = None
        self.version = 0

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def token_bytes(self) -> int:
        """Memory of one token of one row; 0 before anything was appended."""
        return sum(s.element_size() * len(s) * s.shape[2] * s.shape[4] for s in self._stacks)

    @property
    def used_bytes(self) -> int:
        """Memory of the committed tokens."""
        return self.token_bytes * sum(self.lengths)

    @property
    def reserved_bytes(self) -> int:
        """Memory of the buffers."""
        return self.token_bytes * self._row_capacity * self._token_capacity

    @property
    def capacity(self) -> int:
        """Columns that the buffers have."""
        return self._token_capacity

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
            for stack in self._stacks if length else ():
                stack[:, row, :, :length] = stack[:, last, :, :length]
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

    @contextmanager
    def scattered(self, columns: Tensor, width: int) -> Iterator[None]:
        """Within, `update` writes to the columns that a tensor [R, n] names and returns the first `width` ones.

        Nothing then depends on the rows' lengths, which a recorded pass could not follow. The columns are those that
        `open` announced.
        """
        self._scatter = (columns, width)
        try:
            yield
        finally:
            self._scatter = None

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
                source = torch.tensor(path[settled:], device=self._stacks[0].device) + base
                for stack in self._stacks:
                    stack[:, row, :, base + settled : base + len(path)] = stack[:, row].index_select(
                        2, source
                    )
            self.lengths[row] += len(path)
        self.pending = 0

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and tokens of buffers that grew, from none, to hold so many rows of so many tokens."""
        return self._shape(rows, tokens, 1, min(_FIRST_TOKENS, self.max_tokens))

    @torch.inference_mode()
    def confine(self, rows: int, tokens: int, limit: int) -> None:
        """Give memory back where growing to buffers of `shape` would lead to more than `limit` bytes.

        Buffers never shrink by themselves, so one row may have left them long, and many short ones wide.

        Raises:
            CacheMemoryError: the device has no room for the smaller buffers beside the old ones.
        """
        grown = max(rows, self._row_capacity) * max(tokens, self._token_capacity)
        if self.token_bytes * grown > limit:
            self._restack(min(rows, self._row_capacity), min(tokens, self._token_capacity))

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row after the first `length`."""
        self.lengths[row] = min(self.lengths[row], length)

    def read(self, row: int, start: int, stop: int) -> Columns:
        """Views of the keys and values of a row's committed tokens start..stop-1."""
        pairs = zip(self._keys, self._values, strict=True)
        return [
            (keys[row, :, start:stop], values[row, :, start:stop])
            for keys, values in pairs
            if keys is not None and values is not None
        ]

    @torch.inference_mode()
    def write(self, row: int, columns: Columns) -> None:
        """Append committed tokens to a row.

        Raises:
            CacheMemoryError: the device cannot hold the grown cache.
        """
        count = columns[0][0].shape[1]
        self.open(row, row + 1, count)
        for layer, (keys, values) in enumerate(columns):
            self.update(keys[None], values[None], layer)
        self.lengths[row] += count

    def take(self, other: KVCache) -> int:
        """Append a row with what the only row of another cache holds; returns its index.

        Raises:
            CacheMemoryError: the device cannot hold the grown cache; no row was added.
        """
        row = self.add_row()
        try:
            self.write(row, other.read(0, 0, other.lengths[0]))
        except CacheMemoryError:
            self.drop_row(row)
            raise
        return row

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)

    def _append(self, buffers: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        start, stop = self._window
        buffer = buffers[layer]
        if buffer is None:
            buffer = buffers[layer] = self._new_buffer(states)
        if self._scatter is not None:
            columns, width = self._scatter
            buffer[start:stop].scatter_(2, columns[:, None, :, None].expand_as(states), states)
            return buffer[start:stop, :, :width]
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

    def _new_buffer(self, states: Tensor) -> Tensor:
        """A place in the stack of its kind for the buffer of these states [R, H, n, D]."""
        kind = _kind(states)
        if not self._free.get(kind):
            shape = (2 * self._layers, self._row_capacity, kind[0], self._token_capacity, kind[1])
            self._stacks.append(self._zeros(shape, states.dtype, states.device))
            self._free[kind] = list(self._stacks[-1])[::-1]
        return self._free[kind].pop()

    def _grow(self, rows: int, tokens: int) -> None:
        if rows <= self._row_capacity and tokens <= self._token_capacity:
            return
        row_capacity, token_capacity = self._shape(rows, tokens, self._row_capacity, self._token_capacity)
        self._check_memory(row_capacity, token_capacity)
        self._restack(row_capacity, token_capacity)

    def _shape(self, rows: int, tokens: int, row_capacity: int, token_capacity: int) -> tuple[int, int]:
        """Rows and tokens of buffers that had so many of each and must hold so many."""
        while row_capacity < rows:
            row_capacity *= 2
        while token_capacity < tokens:
            token_capacity *= 2
        return row_capacity, max(tokens, min(token_capacity, self.max_tokens))

    def _restack(self, rows: int, tokens: int) -> None:
        """Put the buffers of one kind into one new stack, of so many rows and tokens, which hold what is committed."""
        kinds: dict[Kind, list[tuple[list[Tensor | None], int, Tensor]]] = {}
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    kinds.setdefault(_kind(buffer), []).append((buffers, layer, buffer))
        # All are made before any is used: without room for one, the old ones stay as they are.
        stacks = [
            self._zeros((len(members), rows, heads, tokens, size), dtype, members[0][2].device)
            for (heads, size, dtype), members in kinds.items()
        ]
        self._stacks, self._free = stacks, {}
        self.version += 1
        for stack, members in zip(stacks, kinds.values(), strict=True):
            for place, (buffers, layer, buffer) in enumerate(members):
                kept = buffer[:rows, :, :tokens]
                stack[place, : kept.shape[0], :, : kept.shape[2]] = kept
                buffers[layer] = stack[place]
        self._row_capacity, self._token_capacity = rows, tokens

    def _check_memory(self, rows: int, tokens: int) -> None:
        if not self._stacks:
            return
        need = sum(s.element_size() * len(s) * rows * tokens * s.shape[2] * s.shape[4] for s in self._stacks)
        free = available_bytes(self._stacks[0].device)
        if free is not None and need > free:
            raise _no_memory(rows, tokens, need, free)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        # Hidden columns get weight 0, and 0 * NaN is NaN: the buffers must never hold garbage.
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise _no_memory(shape[1], shape[3], torch.Size(shape).numel() * dtype.itemsize, None) from error


def _kind(buffer: Tensor) -> Kind:
    """What buffers of one stack have in common: heads, head size, dtype; of a buffer or a stack of them."""
    return buffer.shape[-3], buffer.shape[-1], buffer.dtype


def _no_memory(rows: int, tokens: int, need: int, free: int | None) -> CacheMemoryError:
    room = "" if free is None else f", {free / 2**20:.0f} MiB are free"
    return CacheMemoryError(
        f"the key/value cache for {rows} rows of {tokens} tokens needs {need / 2**20:.0f} MiB more{room}; "
        "use fewer sequences at once, a shorter prompt, or a smaller max_context"
    )


@dataclass(frozen=True)
class Holding:
    """A cache that keeps keys and values of every committed token of every row.

    Attributes:
        cache: as it is now.
        measure: gives the bytes of one column of one row; called once at the most.
        spare: most columns of a row that are not committed.
        longest: most committed tokens of a row, however long its text is.
        row: bytes kept of each row beside its columns.
    """

    cache: KVCache
    measure: Callable[[], int]
    spare: int
    longest: int
    row: int = 0

    @cached_property
    def token(self) -> int:
        """Bytes of one column of one row."""
        return self.measure()

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and columns of buffers that hold so many rows of texts of so many tokens."""
        return self.cache.shape(rows, min(tokens, self.longest) + self.spare)

    def bytes(self, rows: int, tokens: int) -> int:
        """Memory of so many rows of texts of so many tokens."""
        width, columns = self.shape(rows, tokens)
        return self.token * width * columns + self.row * rows

    def confine(self, rows: int, tokens: int, slack: int = 0) -> None:
        """Give memory back where growing to `shape` would take more than `bytes` and so many bytes more.

        Raises:
            CacheMemoryError: the device has no room for the smaller buffers beside the old ones.
        """
        width, columns = self.shape(rows, tokens)
        self.cache.confine(width, columns, self.token * width * columns + slack)


def token_bytes(target: Any) -> int:
    """Memory of the keys and values of a token; a `Target` is run once to see."""
    probe = target.new_cache(1)
    for _ in target.prefill(probe, probe.add_row(), [0]):
        pass
    return probe.token_bytes
