"""The key/value cache: rows of tokens, appended to and cut in place.

A forward takes two calls: `open` makes room for its tokens and says where they go, and transformers calls `update` in
each layer to put them there. They stay uncommitted until `commit` keeps those of the accepted path, moved to the front,
and so forgets the rest; a forward that is never committed leaves no trace.

Memory is linear in tokens. Every layer has two buffers [rows, heads, tokens, head size] that grow by doubling; those
of one shape lie in one stack, so that moving columns is one operation for all layers. Rows are packed: the rows in use
are always 0..rows-1, and dropping one moves the last row into its place.
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
from ddtree.model import TargetModel

_FIRST_TOKENS = 256

Kind = tuple[int, int, torch.dtype]
"""Heads, head size and dtype: what buffers of one stack have in common."""
Columns = list[tuple[Tensor, Tensor]]
"""Keys and values of some tokens of one row, layer by layer, [H, n, D]."""


class KVCache:
    """Keys and values of R rows, passed to a transformers model as its cache.

    Args:
        max_tokens: most columns a row may ever need, uncommitted ones included (8,192 + 1,025, for example).
        layers: layers to expect; more may come.

    Attributes:
        lengths: committed tokens of each row in use.
        max_tokens: as given.
        version: changes whenever the buffers do.
    """

    is_compileable = False

    def __init__(self, max_tokens: int, layers: int = 1) -> None:
        self.lengths: list[int] = []
        self.max_tokens = max_tokens
        self.version = 0
        self._layers = layers
        # Keys of layer i in slot 2 * i, values in the slot after it. Each buffer is a slice of one of the stacks
        # [2 * layers, rows, heads, tokens, head size].
        self._buffers: dict[int, Tensor] = {}
        self._stacks: list[Tensor] = []
        self._free: dict[Kind, list[Tensor]] = {}
        self._row_capacity = 1
        self._token_capacity = min(_FIRST_TOKENS, max_tokens)
        # The rows of the forward that was opened last, and where its first column lies after their lengths.
        self._window = (0, 0)
        self._pending = 0
        self._scatter: tuple[Tensor, int] | None = None

    @property
    def rows(self) -> int:
        """Return how many rows are in use."""
        return len(self.lengths)

    @property
    def token_bytes(self) -> int:
        """Return the memory of one token of one row; 0 before anything was appended."""
        return sum(s.element_size() * len(s) * s.shape[2] * s.shape[4] for s in self._stacks)

    @property
    def used_bytes(self) -> int:
        """Return the memory of the committed tokens."""
        return self.token_bytes * sum(self.lengths)

    @property
    def reserved_bytes(self) -> int:
        """Return the memory of the buffers."""
        return self.token_bytes * self._row_capacity * self._token_capacity

    @property
    def capacity(self) -> int:
        """Return how many columns the buffers have."""
        return self._token_capacity

    def add_row(self) -> int:
        """Append an empty row and return its index."""
        self.lengths.append(0)
        return self.rows - 1

    @torch.inference_mode()
    def drop_row(self, row: int) -> None:
        """Free a row; the last row takes its index. Uncommitted columns are lost."""
        last = self.rows - 1
        if row != last:
            length = self.lengths[last]
            # A row that holds nothing yet may lie beyond the buffers, which grow when a row is first written.
            for stack in self._stacks if length else ():
                stack[:, row, :, :length] = stack[:, last, :, :length]
        drop_row(self.lengths, row)

    def open(self, start: int, stop: int, columns: int, pending: int = 0) -> int:
        """Make room for a forward of rows start..stop-1 with `columns` new columns each; return the key length L.

        The new columns follow the committed tokens of each row and `pending` uncommitted columns after them, which
        earlier forwards over the same rows appended since the last commit.

        Raises:
            CacheMemoryError: the device cannot hold the grown cache.
        """
        if pending and self._window != (start, stop):
            raise RuntimeError("the pending columns are those of another window")
        self._window = (start, stop)
        self._pending = pending
        keys = max(self.lengths[start:stop]) + pending + columns
        self._grow(self.rows, keys)
        return keys

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a layer's [R, H, n, D]; return views of its keys and values [R, H, L, D] (transformers' hook)."""
        return self._append(2 * layer_idx, key), self._append(2 * layer_idx + 1, value)

    @contextmanager
    def scattered(self, columns: Tensor, keys: int) -> Iterator[None]:
        """Let `update` write to the columns that a tensor [R, n] names, and return the first `keys` columns.

        Nothing then depends on the rows' lengths, which a recorded pass could not follow. The columns are those that
        `open` made room for.
        """
        self._scatter = (columns, keys)
        try:
            yield
        finally:
            self._scatter = None

    @torch.inference_mode()
    def commit(self, paths: list[list[int]]) -> None:
        """Keep the uncommitted columns `paths[r]` of each row opened last, in that order, and forget the others.

        `paths[r]` is increasing: [0, 2, 5] keeps the root and two of its descendants. Columns already in place are
        not copied; the others are all read before any is written, and none moves backwards onto one still to be read.
        """
        start, stop = self._window
        for row, path in zip(range(start, stop), paths, strict=True):
            base, kept = self.lengths[row], len(path)
            settled = next((place for place, column in enumerate(path) if place != column), kept)
            if settled < kept:
                source = torch.tensor(path[settled:], device=self._stacks[0].device) + base
                for stack in self._stacks:
                    moved = stack[:, row].index_select(2, source)
                    stack[:, row, :, base + settled : base + kept] = moved
            self.lengths[row] += kept

    def read(self, row: int, start: int, stop: int) -> Columns:
        """Return views of the keys and values of a row's committed tokens start..stop-1."""
        parts = [self._buffers[slot][row, :, start:stop] for slot in sorted(self._buffers)]
        return list(zip(parts[::2], parts[1::2], strict=True))

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
        """Append a row with a copy of the only row of another cache; return its index.

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

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return rows and columns of buffers that grew, from none, to hold so many rows of so many tokens."""
        return self._grown(rows, tokens, 1, min(_FIRST_TOKENS, self.max_tokens))

    @torch.inference_mode()
    def shrink_to(self, rows: int, tokens: int, limit: int) -> None:
        """Give memory back where growing to buffers of `shape` would lead to more than `limit` bytes.

        Buffers never shrink by themselves, so one row may have left them long, and many short ones wide.

        Raises:
            CacheMemoryError: the device has no room for the smaller buffers beside the old ones.
        """
        grown = max(rows, self._row_capacity) * max(tokens, self._token_capacity)
        if self.token_bytes * grown > limit:
            self._restack(min(rows, self._row_capacity), min(tokens, self._token_capacity))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the longest row's committed length (transformers' hook)."""
        return max(self.lengths, default=0)

    def _append(self, slot: int, states: Tensor) -> Tensor:
        """Put states [R, H, n, D] into the buffer of a slot; return a view of its columns [R, H, L, D]."""
        if slot not in self._buffers:
            self._buffers[slot] = self._new_buffer(states)
        start, stop = self._window
        buffer = self._buffers[slot][start:stop]
        if self._scatter is not None:
            columns, keys = self._scatter
            buffer.scatter_(2, columns[:, None, :, None].expand_as(states), states)
            return buffer[:, :, :keys]
        n = states.shape[2]
        firsts = [length + self._pending for length in self.lengths[start:stop]]
        if min(firsts) == max(firsts):
            buffer[:, :, firsts[0] : firsts[0] + n] = states
        else:
            for row, first in enumerate(firsts):
                buffer[row, :, first : first + n] = states[row]
        return buffer[:, :, : max(firsts) + n]

    def _new_buffer(self, states: Tensor) -> Tensor:
        """Return a free slice of the stack for states of this kind [R, H, n, D]; stacks are made as layers come."""
        kind = _kind(states)
        if not self._free.get(kind):
            shape = (2 * self._layers, self._row_capacity, kind[0], self._token_capacity, kind[1])
            self._stacks.append(_zeros(shape, states.dtype, states.device))
            self._free[kind] = list(self._stacks[-1])[::-1]
        return self._free[kind].pop()

    def _grow(self, rows: int, tokens: int) -> None:
        if rows <= self._row_capacity and tokens <= self._token_capacity:
            return
        rows, tokens = self._grown(rows, tokens, self._row_capacity, self._token_capacity)
        need = self.token_bytes * rows * tokens
        free = available_bytes(self._stacks[0].device) if self._stacks else None
        if free is not None and need > free:
            raise _no_memory(rows, tokens, need, free)
        self._restack(rows, tokens)

    def _grown(self, rows: int, tokens: int, row_capacity: int, token_capacity: int) -> tuple[int, int]:
        """Return the capacities, doubled until they hold so many rows of so many tokens."""
        while row_capacity < rows:
            row_capacity *= 2
        while token_capacity < tokens:
            token_capacity *= 2
        return row_capacity, max(tokens, min(token_capacity, self.max_tokens))

    def _restack(self, rows: int, tokens: int) -> None:
        """Move the committed tokens into new stacks, one for each kind of buffer, of so many rows and tokens."""
        kinds: dict[Kind, list[int]] = {}
        for slot, buffer in self._buffers.items():
            kinds.setdefault(_kind(buffer), []).append(slot)
        # All are made before any is used: without room for one, the old ones stay as they are.
        stacks = [
            _zeros((len(slots), rows, heads, tokens, size), dtype, self._buffers[slots[0]].device)
            for (heads, size, dtype), slots in kinds.items()
        ]
        self._stacks, self._free = stacks, {}
        self.version += 1
        for stack, slots in zip(stacks, kinds.values(), strict=True):
            for place, slot in zip(stack, slots, strict=True):
                kept = self._buffers[slot][:rows, :, :tokens]
                place[: len(kept), :, : kept.shape[2]] = kept
                self._buffers[slot] = place
        self._row_capacity, self._token_capacity = rows, tokens


def drop_row(states: list[Any], row: int) -> None:
    """Remove a row's state from a list with one entry for each row; the last entry moves into its place."""
    last = states.pop()
    if row < len(states):
        states[row] = last


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes; None where the platform does not tell."""
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
    """Return the error, with what to do, that a user gets for a `torch.OutOfMemoryError`."""
    return CacheMemoryError(
        f"{device} ran out of memory: use fewer sequences at once, shorter prompts, a smaller budget or a smaller dtype"
    )


def _no_memory(rows: int, tokens: int, need: int, free: int | None) -> CacheMemoryError:
    room = "" if free is None else f", {free / 2**20:.0f} MiB are free"
    return CacheMemoryError(
        f"the key/value cache for {rows} rows of {tokens} tokens needs {need / 2**20:.0f} MiB more{room}; "
        "use fewer sequences at once, a shorter prompt, or a smaller max_context"
    )


def _kind(buffer: Tensor) -> Kind:
    return buffer.shape[-3], buffer.shape[-1], buffer.dtype


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Hidden columns get weight 0, and 0 * NaN is NaN: the buffers must never hold garbage.
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise _no_memory(shape[1], shape[3], torch.Size(shape).numel() * dtype.itemsize, None) from error


@dataclass(frozen=True)
class KVFootprint:
    """An upper bound on the memory of a cache, before its rows are there.

    Attributes:
        cache: the cache; it keeps keys and values of every committed token of every row.
        measure: returns the bytes of one column of one row; called once at most.
        spare: most uncommitted columns of a row (64, for example).
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
        """Return the bytes of one column of one row."""
        return self.measure()

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return rows and columns of buffers that hold so many rows of texts of so many tokens."""
        return self.cache.shape(rows, min(tokens, self.longest) + self.spare)

    def bytes(self, rows: int, tokens: int) -> int:
        """Return the most memory of so many rows of texts of so many tokens."""
        width, columns = self.shape(rows, tokens)
        return self.token * width * columns + self.row * rows

    def shrink_to(self, rows: int, tokens: int, slack: int = 0) -> None:
        """Shrink the buffers where growing to `shape` would take more than its bytes and `slack` bytes more.

        Raises:
            CacheMemoryError: the device has no room for the smaller buffers beside the old ones.
        """
        width, columns = self.shape(rows, tokens)
        self.cache.shrink_to(width, columns, self.token * width * columns + slack)


def token_bytes(target: TargetModel) -> int:
    """Return the memory of the keys and values of a token. The target is run once, over one token."""
    probe = target.new_cache(1)
    for _ in target.prefill(probe, probe.add_row(), [0]):
        pass
    return probe.token_bytes
