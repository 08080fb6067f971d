"""Counts the n-grams of texts, and chooses the most useful of them for a table of a given size.

A context is worth what its counts add to those of its shorter suffix: the expected gain in log-probability of the
tokens that will follow it, times its expected occurrences. That is the relative entropy of the two estimates (as in
Stolcke, "Entropy-based pruning of backoff language models", 1998), weighed by the occurrences of the context. A
successor is kept where it gains more for its bytes than `theta`, a context where its kept successors pay for its own
bytes too; theta is the lowest one with which the table fits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from ddtree.drafters import ngram_table
from ddtree.drafters.ngram_table import (
    BUCKETS,
    DOUBT,
    FORMAT,
    LEVELS,
    MAX_ORDER,
    MAX_SUCCESSORS,
    NgramTable,
)
from ddtree.errors import ConfigError, check_whole
from ddtree.sampling.noise import check_coupling
from ddtree.storage import atomic_write

SAMPLED_COUPLING = (0.7, 1.0)
"""Noise coupling that fits tables of a target's sampled answers: 5 % more accepted at temperature 1 (demo target)."""
_CONTEXT_BYTES = 5
_FIXED_BYTES = 4 * (BUCKETS + 1) + 1024
_KINDS = 64  # more different successors add no more doubt
_LESS = 0.5  # a context that occurs n times comes up again n - 0.5 times in as much text

Array = NDArray[Any]


def build_table(
    sequences: Iterable[Sequence[int]],
    path: str | os.PathLike[str],
    max_order: int = 5,
    max_bytes: int | None = None,
    max_successors: int = MAX_SUCCESSORS,
    coupling: tuple[float, float] = SAMPLED_COUPLING,
) -> NgramTable:
    """Count the n-grams of token sequences, write them as a table and open it.

    Args:
        sequences: texts as token ids; no n-gram crosses from one to the next.
        path: the file to write, replaced in one step.
        max_order: longest context, 1..8.
        max_bytes: most bytes of the file, as 8_000_000, filled with the most useful n-grams; None keeps everything.
        max_successors: most successors to keep of a context, the most frequent ones, 1..255.
        coupling: (beta, kappa) that `Lookup` uses with the table for sampled rows.

    Raises:
        ConfigError: an argument is out of range, or nothing fits into `max_bytes`.
    """
    check_whole("max_order", max_order, 1, MAX_ORDER)
    check_whole("max_successors", max_successors, 1, 255)
    check_coupling(*coupling)
    text, lengths = _concatenated(sequences)
    token_type = np.uint16 if text.max(initial=0) < 2**16 else np.uint32
    pair_bytes = np.dtype(token_type).itemsize + 1
    room = None if max_bytes is None else max_bytes - _FIXED_BYTES
    most = None if room is None else max(room, 0) // _CONTEXT_BYTES
    found = _merged([part.best(most) for part in _count_orders(text, lengths, max_order, max_successors)])
    if room is not None and found.file_bytes(0.0, pair_bytes) > room:
        if room < _CONTEXT_BYTES + pair_bytes:
            raise ConfigError(f"max_bytes={max_bytes} holds no n-gram: allow more than {_FIXED_BYTES}")
        found = found.prune(found.threshold(room, pair_bytes), pair_bytes)
    beta, kappa = coupling
    metadata = {"format": FORMAT, "max_order": str(max_order), "beta": str(beta), "kappa": str(kappa)}
    with atomic_write(Path(path)) as partial:
        partial.write_bytes(save(found.arrays(token_type), metadata=metadata))
    return NgramTable.load(path)


@dataclass
class _Contexts:
    """Contexts in the order of their keys, with their successors side by side.

    Attributes:
        keys: uint32 [C].
        totals, kinds: whole numbers [C], occurrences and different successors (up to `_KINDS`), kept or not.
        first: int64 [C], the place of each context's first successor.
        tokens: uint32 [S], the successors of all contexts, one context after another.
        counts: int32 [S].
        gains: float32 [S], the worth of each successor; not below 0.
    """

    keys: Array
    totals: Array
    kinds: Array
    first: Array
    tokens: Array
    counts: Array
    gains: Array

    def sizes(self) -> Array:
        """Return how many successors each context has: int64 [C]."""
        return np.diff(self.first, append=len(self.tokens))

    def select(self, contexts: Array, successors: Array) -> _Contexts:
        """Return those of two masks, bool [C] and [S]; a context that is left without successors goes too."""
        successors = successors & contexts.repeat(self.sizes())
        left = _sums(successors, self.first)
        contexts = left > 0
        left = left[contexts]
        return _Contexts(
            self.keys[contexts],
            self.totals[contexts],
            self.kinds[contexts],
            np.cumsum(left) - left,
            self.tokens[successors],
            self.counts[successors],
            self.gains[successors],
        )

    def limit_successors(self, most: int) -> _Contexts:
        """Return the contexts with their `most` most frequent successors; of equal ones the lowest tokens."""
        sizes = self.sizes()
        wide = sizes > most
        if not wide.any():
            return self
        places = np.flatnonzero(wide.repeat(sizes))
        contexts = np.arange(len(sizes)).repeat(sizes)[places]
        places = places[np.lexsort((self.tokens[places], -self.counts[places], contexts))]
        ranks = np.arange(len(places)) - (np.cumsum(sizes[wide]) - sizes[wide]).repeat(sizes[wide])
        kept = np.ones(len(self.tokens), np.bool_)
        kept[places[ranks >= most]] = False
        return self.select(np.ones(len(sizes), np.bool_), kept)

    def best(self, most: int | None) -> _Contexts:
        """Return the `most` contexts that gain most for their bytes: no more of one order fit into the file."""
        if most is None or len(self.keys) <= most:
            return self
        worth = _sums(self.gains, self.first) / (_CONTEXT_BYTES + 3 * self.sizes())
        least = np.partition(worth, len(worth) - most - 1)[len(worth) - most - 1]
        return self.select(worth > least, np.ones(len(self.tokens), np.bool_))

    def prune(self, theta: float, pair_bytes: int) -> _Contexts:
        """Return what gains at least `theta` a byte; a successor takes `pair_bytes`."""
        return self.select(*self._worthy(theta, pair_bytes))

    def file_bytes(self, theta: float, pair_bytes: int) -> int:
        """Return the bytes of the file that what `prune` leaves takes, without `_FIXED_BYTES`."""
        contexts, successors = self._worthy(theta, pair_bytes)
        pairs = int(_sums(successors, self.first)[contexts].sum())
        return _CONTEXT_BYTES * int(contexts.sum()) + pair_bytes * pairs

    def threshold(self, room: int, pair_bytes: int) -> float:
        """Return about the lowest theta with which the bytes fit into the room."""
        low, high = 1e-9, 1e9
        for _ in range(40):
            middle = (low * high) ** 0.5
            if self.file_bytes(middle, pair_bytes) > room:
                low = middle
            else:
                high = middle
        return high

    def arrays(self, token_type: type[np.unsignedinteger[Any]]) -> dict[str, Array]:
        """Return the arrays of the file."""
        sizes = self.sizes()
        order = np.lexsort((self.tokens, -self.counts, np.arange(len(sizes)).repeat(sizes)))
        starts = np.searchsorted(self.keys, np.arange(BUCKETS + 1, dtype=np.uint64) << np.uint64(16))
        return {
            "starts": starts.astype(np.uint32),
            "keys": (self.keys & np.uint32(BUCKETS - 1)).astype(np.uint16),
            "sizes": sizes.astype(np.uint8),
            "totals": _levels(self.totals),
            "kinds": _levels(self.kinds),
            "tokens": self.tokens[order].astype(token_type),
            "counts": _levels(self.counts[order]),
        }

    def _worthy(self, theta: float, pair_bytes: int) -> tuple[Array, Array]:
        """Return masks of the contexts and successors that gain at least `theta` a byte."""
        price = np.float32(theta * pair_bytes)
        successors = self.gains >= price
        worth = _sums(np.where(successors, self.gains - price, np.float32(0)), self.first)
        return worth >= theta * _CONTEXT_BYTES, successors


def _concatenated(sequences: Iterable[Sequence[int]]) -> tuple[Array, Array]:
    """Return all tokens as uint32, and the lengths of the texts."""
    parts = []
    for sequence in sequences:
        part = np.asarray(sequence, dtype=np.int64)
        if part.min(initial=0) < 0 or part.max(initial=0) >= 2**32:
            raise ConfigError("a token id is outside 0..2**32 - 1: give token ids of the target's tokenizer")
        parts.append(part.astype(np.uint32))
    text = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    return text, np.array([len(part) for part in parts], np.int64)


def _count_orders(text: Array, lengths: Array, max_order: int, max_successors: int) -> Iterator[_Contexts]:
    """Yield the contexts of each order, the shortest first.

    Corpora fill the memory: each array goes as soon as it has been used.
    """
    places = (np.arange(len(text)) - (np.cumsum(lengths) - lengths).repeat(lengths)).astype(np.int32)
    hashes = np.zeros(len(text), np.uint64)
    # For each place of the text: its (context, successor) pair of the order before, and those pairs' probabilities.
    _, pair, counts = np.unique(text, return_inverse=True, return_counts=True)
    pair, chances = pair.astype(np.int32), (counts / max(len(text), 1)).astype(np.float32)
    for order in range(1, max_order + 1):
        hashes[order:] = (hashes[order:] + text[:-order] + np.uint64(1)) * np.uint64(ngram_table.MULTIPLIER)
        whole = np.flatnonzero(places >= order).astype(np.int32)
        pairs = (hashes[whole] & np.uint64(2**64 - 2**32)) | text[whole]
        by_pair = np.argsort(pairs)
        pairs, whole = pairs[by_pair], whole[by_pair]
        del by_pair
        new = _changes(pairs)
        first = np.flatnonzero(new)
        counts = np.diff(first, append=len(pairs)).astype(np.int32)
        shorter = chances[pair[whole[first]]]
        pair[whole] = np.cumsum(new, dtype=np.int32) - np.int32(1)
        pairs = pairs[first]
        del whole, new
        keys = (pairs >> np.uint64(32)).astype(np.uint32)
        first = np.flatnonzero(_changes(keys))
        sizes = np.diff(first, append=len(keys))
        totals, kinds = _sums(counts, first), sizes.clip(max=_KINDS)
        keys, tokens = keys[first], pairs.astype(np.uint32)
        del pairs
        seen = totals.astype(np.float32).repeat(sizes)
        doubt = (np.float32(DOUBT) * kinds.astype(np.float32)).repeat(sizes)
        chances = ((counts.astype(np.float32) + doubt * shorter) / (seen + doubt)).astype(np.float32)
        del doubt
        gains = ((seen - np.float32(_LESS)) * chances * np.log(chances / shorter)).clip(min=0)
        del seen, shorter
        yield _Contexts(keys, totals, kinds, first, tokens, counts, gains).limit_successors(max_successors)
        del keys, totals, kinds, sizes, first, tokens, counts, gains


def _merged(parts: list[_Contexts]) -> _Contexts:
    """Return the contexts of all orders in the order of their keys; of those that share a key the shortest."""
    keys, totals, kinds, tokens, counts, gains = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("keys", "totals", "kinds", "tokens", "counts", "gains")
    )
    sizes = np.concatenate([part.sizes() for part in parts])
    _, order = np.unique(keys, return_index=True)
    first = np.cumsum(sizes) - sizes
    left = sizes[order]
    after = np.cumsum(left) - left
    # The place of each successor of the chosen contexts among all.
    at = np.arange(int(left.sum())) + (first[order] - after).repeat(left)
    return _Contexts(keys[order], totals[order], kinds[order], after, tokens[at], counts[at], gains[at])


def _changes(values: Array) -> Array:
    """Return where a sorted array holds another value than just before: bool."""
    new = np.ones(len(values), np.bool_)
    new[1:] = values[1:] != values[:-1]
    return new


def _sums(values: Array, first: Array) -> Array:
    """Return the sums of the parts of an array that begin at `first`; none is empty."""
    if not len(first):
        return np.zeros(0, values.dtype)
    kind = np.int64 if values.dtype == np.bool_ else values.dtype
    return np.add.reduceat(values, first, dtype=kind)


def _levels(values: Array) -> Array:
    """Return the places of the nearest levels: uint8."""
    levels = np.array(LEVELS, np.float64)
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values, side="right").astype(np.uint8)
