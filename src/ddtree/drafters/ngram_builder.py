"""Counting n-grams of texts, and choosing the most useful of them for a table of a given size.

What a context is worth is what its counts add to those of its shorter suffix: the expected gain in log-probability
of the tokens that will follow it, as often as it will come up. That is the relative entropy of the two estimates (as
in Stolcke, "Entropy-based pruning of backoff language models", 1998), weighed by the times the context was seen. A
successor is kept where it gains more for its bytes than `theta`, a context where its kept successors pay for its own
bytes too; theta is the lowest one with which the table fits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from ddtree.drafters import ngram_table as ngrams
from ddtree.drafters.ngram_table import (
    BUCKETS,
    DOUBT,
    FORMAT,
    LEVELS,
    MAX_ORDER,
    MAX_SUCCESSORS,
    NgramTable,
    can_couple,
)
from ddtree.errors import ConfigError

SAMPLED_COUPLING = (0.7, 1.0)
"""Noise coupling that fits tables of a target's sampled answers: 5 % more accepted at temperature 1 (demo target)."""
_CONTEXT_BYTES = 5
_FIXED_BYTES = 4 * (BUCKETS + 1) + 1024
_KINDS = 64  # of more different successors no more doubt comes
_LESS = 0.5  # a context seen n times comes up again n - 0.5 times in as much text

Numbers = NDArray[Any]


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
        max_bytes: most bytes of the file, filled with the most useful n-grams; everything when None.
        max_successors: most successors to keep of a context, the most frequent ones, 1..255.
        coupling: (beta, kappa) that `Lookup` shall use with the table for sampled rows.

    Raises:
        ConfigError: an argument is out of range, or nothing fits into `max_bytes`.
    """
    if not 1 <= max_order <= MAX_ORDER:
        raise ConfigError(
            f"max_order={max_order} is outside 1..{MAX_ORDER}: give a whole number in that range"
        )
    if not 1 <= max_successors <= 255:
        raise ConfigError(
            f"max_successors={max_successors} is outside 1..255: give a whole number in that range"
        )
    if not can_couple(*coupling):
        raise ConfigError(f"coupling={coupling}: beta must be at least 0, kappa positive, both finite")
    text, lengths = _joined(sequences)
    token_type = np.uint16 if text.max(initial=0) < 2**16 else np.uint32
    pair_bytes = np.dtype(token_type).itemsize + 1
    room = None if max_bytes is None else max_bytes - _FIXED_BYTES
    most = None if room is None else max(room, 0) // _CONTEXT_BYTES
    found = _together([order.best(most) for order in _orders(text, lengths, max_order, max_successors)])
    if room is not None and found.bytes(0.0, pair_bytes) > room:
        if room < _CONTEXT_BYTES + pair_bytes:
            raise ConfigError(f"max_bytes={max_bytes} holds no n-gram: allow more than {_FIXED_BYTES}")
        found = found.kept(found.threshold(room, pair_bytes), pair_bytes)
    beta, kappa = coupling
    metadata = {"format": FORMAT, "max_order": str(max_order), "beta": str(beta), "kappa": str(kappa)}
    partial = Path(f"{path}.partial")
    partial.write_bytes(save(found.arrays(token_type), metadata=metadata))
    os.replace(partial, path)
    return NgramTable.load(path)


@dataclass
class _Contexts:
    """Contexts with their successors, those of one context beside each other.

    Attributes:
        keys: uint32 [C].
        totals, kinds: whole numbers [C], times seen and different successors (up to `_KINDS`), kept or not.
        first: int64 [C], where the successors of each begin.
        tokens: uint32 [S].
        counts: int32 [S].
        gains: float32 [S], what each successor is worth; not below 0.
    """

    keys: Numbers
    totals: Numbers
    kinds: Numbers
    first: Numbers
    tokens: Numbers
    counts: Numbers
    gains: Numbers

    def sizes(self) -> Numbers:
        return np.diff(self.first, append=len(self.tokens))

    def taken(self, contexts: Numbers, successors: Numbers) -> _Contexts:
        """Those chosen by masks; a context that is left without successors goes too."""
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

    def best(self, most: int | None) -> _Contexts:
        """The `most` contexts that gain most for their bytes: no more of one order will fit."""
        if most is None or len(self.keys) <= most:
            return self
        worth = _sums(self.gains, self.first) / (_CONTEXT_BYTES + 3 * self.sizes())
        least = np.partition(worth, len(worth) - most - 1)[len(worth) - most - 1]
        return self.taken(worth > least, np.ones(len(self.tokens), np.bool_))

    def kept(self, theta: float, pair_bytes: int) -> _Contexts:
        """What gains at least `theta` a byte."""
        return self.taken(*self._chosen(theta, pair_bytes))

    def bytes(self, theta: float, pair_bytes: int) -> int:
        contexts, successors = self._chosen(theta, pair_bytes)
        pairs = int(_sums(successors, self.first)[contexts].sum())
        return _CONTEXT_BYTES * int(contexts.sum()) + pair_bytes * pairs

    def threshold(self, room: int, pair_bytes: int) -> float:
        """About the lowest theta with which the bytes fit into the room."""
        low, high = 1e-9, 1e9
        for _ in range(40):
            middle = (low * high) ** 0.5
            if self.bytes(middle, pair_bytes) > room:
                low = middle
            else:
                high = middle
        return high

    def _chosen(self, theta: float, pair_bytes: int) -> tuple[Numbers, Numbers]:
        price = np.float32(theta * pair_bytes)
        successors = self.gains >= price
        worth = _sums(np.where(successors, self.gains - price, np.float32(0)), self.first)
        return worth >= theta * _CONTEXT_BYTES, successors

    def arrays(self, token_type: type[np.unsignedinteger[Any]]) -> dict[str, Numbers]:
        """The columns of the file."""
        sizes = self.sizes()
        order = np.lexsort((self.tokens, -self.counts, np.arange(len(sizes)).repeat(sizes)))
        starts = np.searchsorted(self.keys, np.arange(BUCKETS + 1, dtype=np.uint64) << np.uint64(16))
        return {
            "starts": starts.astype(np.uint32),
            "keys": (self.keys & np.uint32(BUCKETS - 1)).astype(np.uint16),
            "sizes": sizes.astype(np.uint8),
            "totals": _codes(self.totals),
            "kinds": _codes(self.kinds),
            "tokens": self.tokens[order].astype(token_type),
            "counts": _codes(self.counts[order]),
        }


def _joined(sequences: Iterable[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """All tokens as uint32, and the lengths of the texts."""
    parts = []
    for sequence in sequences:
        part = np.asarray(sequence, dtype=np.int64)
        if part.min(initial=0) < 0 or part.max(initial=0) >= 2**32:
            raise ConfigError("a token id is outside 0..2**32 - 1: give token ids of the target's tokenizer")
        parts.append(part.astype(np.uint32))
    text = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    return text, np.array([len(part) for part in parts], np.int64)


def _orders(text: Numbers, lengths: Numbers, max_order: int, max_successors: int) -> Iterable[_Contexts]:
    """The contexts of each order, shortest first."""
    places = (np.arange(len(text)) - (np.cumsum(lengths) - lengths).repeat(lengths)).astype(np.int32)
    hashes = np.zeros(len(text), np.uint64)
    # Of each place of the text: which pair of the order before it belongs to, and those pairs' probabilities.
    _, pair, counts = np.unique(text, return_inverse=True, return_counts=True)
    pair, chances = pair.astype(np.int32), (counts / max(len(text), 1)).astype(np.float32)
    for order in range(1, max_order + 1):
        hashes[order:] = (hashes[order:] + text[:-order] + np.uint64(1)) * np.uint64(ngrams.MULTIPLIER)
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
        yield _fewer(_Contexts(keys, totals, kinds, first, tokens, counts, gains), max_successors)
        del keys, totals, kinds, sizes, first, tokens, counts, gains


def _fewer(found: _Contexts, most: int) -> _Contexts:
    """With no more than so many successors of a context, the most frequent ones."""
    sizes = found.sizes()
    wide = sizes > most
    if not wide.any():
        return found
    many = np.flatnonzero(wide.repeat(sizes))
    of = np.arange(len(sizes)).repeat(sizes)[many]
    many = many[np.lexsort((found.tokens[many], -found.counts[many], of))]
    ranks = np.arange(len(many)) - (np.cumsum(sizes[wide]) - sizes[wide]).repeat(sizes[wide])
    kept = np.ones(len(found.tokens), np.bool_)
    kept[many[ranks >= most]] = False
    return found.taken(np.ones(len(sizes), np.bool_), kept)


def _together(parts: list[_Contexts]) -> _Contexts:
    """Contexts of all orders in order of their keys; of those that share one the shortest."""
    keys = np.concatenate([part.keys for part in parts])
    totals = np.concatenate([part.totals for part in parts])
    kinds = np.concatenate([part.kinds for part in parts])
    sizes = np.concatenate([part.sizes() for part in parts])
    _, order = np.unique(keys, return_index=True)
    first = np.cumsum(sizes) - sizes
    left = sizes[order]
    after = np.cumsum(left) - left
    # Where each successor of the chosen contexts stands among all.
    at = np.arange(int(left.sum())) + (first[order] - after).repeat(left)
    tokens = np.concatenate([part.tokens for part in parts])[at]
    counts = np.concatenate([part.counts for part in parts])[at]
    gains = np.concatenate([part.gains for part in parts])[at]
    return _Contexts(keys[order], totals[order], kinds[order], after, tokens, counts, gains)


def _changes(values: Numbers) -> Numbers:
    """bool, where a sorted array holds another value than just before."""
    new = np.ones(len(values), np.bool_)
    new[1:] = values[1:] != values[:-1]
    return new


def _sums(values: Numbers, first: Numbers) -> Numbers:
    """Sums of the parts of an array that begin at `first`; none is empty."""
    if not len(first):
        return np.zeros(0, values.dtype)
    kind = np.int64 if values.dtype == np.bool_ else values.dtype
    return np.add.reduceat(values, first, dtype=kind)


def _codes(values: Numbers) -> Numbers:
    """The nearest levels."""
    levels = np.array(LEVELS, np.float64)
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values, side="right").astype(np.uint8)
