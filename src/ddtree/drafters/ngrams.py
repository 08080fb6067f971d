"""Static n-gram tables: what followed each short context in a set of texts, counted, hashed and memory-mapped.

A context is the last 1..max_order tokens. Its 64-bit hash grows to the left (`extend_hash`), so that one pass over a
suffix gives the hashes of all orders; the file keeps the upper 32 bits. Two contexts with the same 32 bits share an
entry, which costs a little acceptance and never an answer.

The file is one `.safetensors` with, for contexts seen more than once, sorted `keys`, `offsets` into `tokens` and
`counts` (most frequent successor first) and the `totals` of all their successors; contexts seen once are a sorted
`single_keys` with `single_tokens`.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ddtree.errors import CheckpointError, ConfigError

MAX_ORDER = 8
MAX_SUCCESSORS = 64
SAMPLED_COUPLING = (0.7, 1.0)
"""Noise coupling that fits tables of a target's sampled answers: 5 % more accepted at temperature 1 (demo target)."""
_FORMAT = "ddtree-ngrams-1"
_MULTIPLIER = 0xD1342543DE82EF95  # spreads the low bits of token ids over the upper half of the word
_WORD = 2**64 - 1
_BUCKET_BITS = 16

Words = NDArray[np.uint64]


def extend_hash(word: int, token: int) -> int:
    """The hash of a context with `token` put before it; the hash of the empty context is 0."""
    return (word + token + 1) * _MULTIPLIER & _WORD


class Successors(NamedTuple):
    """What followed a context: how often in all, how many tokens are kept, and the first of them with their counts."""

    total: int
    different: int
    tokens: list[int]
    counts: list[int]


class _Keys:
    """Sorted 32-bit keys, found by bisection between the bounds of their upper bits."""

    def __init__(self, keys: NDArray[np.uint32]) -> None:
        self._view = keys.data
        bounds = np.arange(2**_BUCKET_BITS + 1, dtype=np.uint64) << np.uint64(32 - _BUCKET_BITS)
        self._starts: list[int] = np.searchsorted(keys, bounds).tolist()

    def find(self, key: int) -> int:
        """Where the key stands, or -1."""
        bucket = key >> 32 - _BUCKET_BITS
        stop = self._starts[bucket + 1]
        at = bisect_left(self._view, key, self._starts[bucket], stop)
        return at if at < stop and self._view[at] == key else -1


class NgramTable:
    """A table opened from a file; make one with `build_table`, open it with `NgramTable.load`.

    Attributes:
        max_order: longest context that is kept.
        vocab_size: one more than the highest token id in the table.
        contexts: number of contexts kept.
        coupling: (beta, kappa) of noise-coupled drafting that fits the table.
    """

    def __init__(
        self, arrays: dict[str, NDArray[Any]], max_order: int, coupling: tuple[float, float]
    ) -> None:
        self.max_order = max_order
        self.coupling = coupling
        self.contexts = len(arrays["keys"]) + len(arrays["single_keys"])
        tokens, single_tokens = arrays["tokens"], arrays["single_tokens"]
        self.vocab_size = 1 + max(int(tokens.max(initial=0)), int(single_tokens.max(initial=0)))
        self._many, self._single = _Keys(arrays["keys"]), _Keys(arrays["single_keys"])
        self._offsets, self._totals = arrays["offsets"].data, arrays["totals"].data
        self._tokens, self._counts = tokens.data, arrays["counts"].data
        self._single_tokens = single_tokens.data

    @staticmethod
    def load(path: str | os.PathLike[str]) -> NgramTable:
        """Memory-map a table.

        Raises:
            CheckpointError: the file is missing, damaged, or no n-gram table.
        """
        if not Path(path).is_file():
            raise CheckpointError(f"there is no n-gram table at {path}: build one with `ddtree train`")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged: {error}; build it again with `ddtree train`"
            ) from error
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} is no n-gram table of this version (format {metadata.get('format')!r}, not {_FORMAT!r}): "
                "build it again with `ddtree train`"
            )
        fault = _fault(arrays)
        try:
            order = int(metadata["max_order"])
            coupling = float(metadata.get("beta", 0)), float(metadata.get("kappa", 1))
            if not (1 <= order <= MAX_ORDER and _can_couple(*coupling)):
                fault = f"its settings are out of range: {metadata}"
        except (KeyError, ValueError):
            fault = f"its settings cannot be read: {metadata}"
        if fault:
            raise CheckpointError(f"{path} is damaged: {fault}; build it again with `ddtree train`")
        return NgramTable(arrays, order, coupling)

    def find(self, word: int, most: int = MAX_SUCCESSORS) -> Successors | None:
        """What followed the context with this 64-bit hash, the `most` frequent tokens; None for an unknown one."""
        key = word >> 32
        at = self._many.find(key)
        if at >= 0:
            start, end = self._offsets[at], self._offsets[at + 1]
            stop = min(end, start + most)
            tokens, counts = self._tokens[start:stop].tolist(), self._counts[start:stop].tolist()
            return Successors(self._totals[at], end - start, tokens, counts)
        at = self._single.find(key)
        return None if at < 0 else Successors(1, 1, [self._single_tokens[at]], [1])

    def successors(self, context: Sequence[int]) -> Successors | None:
        """What followed a context of at most `max_order` tokens; None for an unknown one."""
        word = 0
        for token in reversed(context):
            word = extend_hash(word, token)
        return self.find(word)


def _can_couple(beta: float, kappa: float) -> bool:
    return 0 <= beta < math.inf and 0 < kappa < math.inf


def _fault(arrays: dict[str, NDArray[Any]]) -> str:
    """What makes the arrays unusable, so that no lookup can fail later; empty when they are sound."""
    small, wide = (np.uint16, np.uint32), (np.uint32,)
    kinds = {"keys": wide, "offsets": wide, "totals": wide, "tokens": small, "counts": small}
    kinds |= {"single_keys": wide, "single_tokens": small}
    for name, dtypes in kinds.items():
        if name not in arrays:
            return f"it has no {name}"
        if arrays[name].dtype not in dtypes or arrays[name].ndim != 1:
            return f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}"
    offsets, entries = arrays["offsets"], len(arrays["keys"])
    if len(offsets) != entries + 1 or len(arrays["totals"]) != entries:
        return "keys, offsets and totals differ in length"
    if len(arrays["tokens"]) != len(arrays["counts"]) or offsets[-1] != len(arrays["tokens"]) or offsets[0]:
        return "offsets, tokens and counts do not fit together"
    if len(arrays["single_keys"]) != len(arrays["single_tokens"]):
        return "single_keys and single_tokens differ in length"
    for name in ("keys", "offsets", "single_keys"):
        if (arrays[name][1:] <= arrays[name][:-1]).any():
            return f"{name} is not in order"
    return ""


@dataclass
class _Order:
    """The n-grams of one order: (context, successor) pairs in order of the context's key.

    Attributes:
        pairs: uint64, the context's key in the upper half, the successor in the lower.
        counts: how often each pair was seen.
        totals: of each pair's context, how often that was seen.
        redundant: whether the context was seen once and its next shorter suffix was too, so that both hold one and
            the same place of the text.
    """

    pairs: Words
    counts: NDArray[np.int64]
    totals: NDArray[np.int64]
    redundant: NDArray[np.bool_]

    def kept(self, threshold: int) -> NDArray[np.bool_]:
        """Which pairs stay: 0 keeps all, 1 drops redundant contexts, t > 1 drops contexts seen less than t times."""
        if threshold <= 1:
            return ~self.redundant if threshold else np.ones(len(self.pairs), np.bool_)
        return self.totals >= threshold

    def bytes(self, threshold: int, token_bytes: int, max_successors: int) -> int:
        """Size in the file of what stays."""
        kept = self.kept(threshold)
        singles = int((kept & (self.totals == 1)).sum())
        _, sizes = np.unique(self.pairs[kept & (self.totals > 1)] >> np.uint64(32), return_counts=True)
        return (
            singles * (4 + token_bytes)
            + len(sizes) * 12
            + int(sizes.clip(max=max_successors).sum()) * (token_bytes + 2)
        )


def build_table(
    sequences: Iterable[Sequence[int]],
    path: str | os.PathLike[str],
    max_order: int = 5,
    max_bytes: int | None = None,
    max_successors: int = MAX_SUCCESSORS,
    coupling: tuple[float, float] = SAMPLED_COUPLING,
) -> NgramTable:
    """Count the n-grams of token sequences, write them as a table and open it.

    A million tokens take about 2 seconds and 600 MB of memory.

    To fit `max_bytes`, contexts are dropped whole and those that stay keep their exact counts: first those seen once
    whose shorter suffix was seen once too, then those seen less than 2, 3, ... times, the longest ones first.

    Args:
        sequences: texts as token ids; no n-gram crosses from one to the next.
        path: the file to write, replaced in one step.
        max_order: longest context, 1..8.
        max_bytes: most bytes of the file; unlimited when None.
        max_successors: most successors to keep of a context, the most frequent ones.
        coupling: (beta, kappa) that `Lookup` shall use with the table for sampled rows.

    Raises:
        ConfigError: an argument is out of range, or nothing fits into `max_bytes`.
    """
    if not 1 <= max_order <= MAX_ORDER:
        raise ConfigError(
            f"max_order={max_order} is outside 1..{MAX_ORDER}: give a whole number in that range"
        )
    if max_successors < 1:
        raise ConfigError(f"max_successors={max_successors} keeps nothing: give at least 1")
    if not _can_couple(*coupling):
        raise ConfigError(f"coupling={coupling}: beta must be at least 0, kappa positive, both finite")
    parts = [np.asarray(sequence, dtype=np.int64) for sequence in sequences if len(sequence)]
    flat = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if flat.min(initial=0) < 0 or flat.max(initial=0) >= 2**32:
        raise ConfigError("a token id is outside 0..2**32 - 1: give token ids of the target's tokenizer")
    orders = _count(flat, [len(part) for part in parts], max_order)
    token_type = np.uint16 if flat.max(initial=0) < 2**16 else np.uint32
    thresholds = _fit(orders, max_bytes, np.dtype(token_type).itemsize, max_successors)
    arrays = _arrays(orders, thresholds, token_type, max_successors)
    beta, kappa = coupling
    metadata = {"format": _FORMAT, "max_order": str(max_order), "beta": str(beta), "kappa": str(kappa)}
    partial = Path(f"{path}.partial")
    partial.write_bytes(save(arrays, metadata=metadata))
    os.replace(partial, path)
    return NgramTable.load(path)


def _count(tokens: NDArray[np.int64], lengths: list[int], max_order: int) -> list[_Order]:
    words = tokens.astype(np.uint64)
    places = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.zeros(0, np.int64)
    hashes = np.zeros(len(words), np.uint64)
    alone = np.zeros(len(words), np.bool_)
    orders = []
    for order in range(1, max_order + 1):
        hashes[order:] = (hashes[order:] + words[:-order] + np.uint64(1)) * np.uint64(_MULTIPLIER)
        whole = np.flatnonzero(places >= order)
        keys = hashes[whole] >> np.uint64(32)
        _, back, seen = np.unique(keys, return_inverse=True, return_counts=True)
        once = seen[back] == 1
        pairs, first, counts = np.unique(
            keys << np.uint64(32) | words[whole], return_index=True, return_counts=True
        )
        redundant = once & alone[whole]
        orders.append(_Order(pairs, counts, seen[back][first], redundant[first]))
        alone[whole] = once
    return orders


def _fit(orders: list[_Order], max_bytes: int | None, token_bytes: int, max_successors: int) -> list[int]:
    """For each order the lowest threshold with which the file fits."""
    thresholds = [0] * len(orders)
    if max_bytes is None:
        return thresholds
    sizes = [order.bytes(0, token_bytes, max_successors) for order in orders]
    room = max_bytes - 1024
    highest = max((int(order.totals.max(initial=0)) for order in orders), default=0)
    for threshold in range(1, highest + 2):
        for index in reversed(range(len(orders))):
            if sum(sizes) <= room:
                return thresholds
            thresholds[index] = threshold
            sizes[index] = orders[index].bytes(threshold, token_bytes, max_successors)
    if not any(sizes) and highest:
        raise ConfigError(f"max_bytes={max_bytes} holds no n-gram: allow more")
    return thresholds


def _arrays(
    orders: list[_Order],
    thresholds: list[int],
    token_type: type[np.unsignedinteger[Any]],
    max_successors: int,
) -> dict[str, NDArray[Any]]:
    kept = [order.kept(threshold) for order, threshold in zip(orders, thresholds, strict=True)]
    every = np.concatenate([order.pairs[keep] for order, keep in zip(orders, kept, strict=True)])
    weights = np.concatenate([order.counts[keep] for order, keep in zip(orders, kept, strict=True)])
    # Contexts that share a key, of whatever orders, become one entry.
    pairs, back = np.unique(every, return_inverse=True)
    counts = np.bincount(back, weights, len(pairs)).astype(np.int64)
    keys = (pairs >> np.uint64(32)).astype(np.uint32)
    successors = (pairs & np.uint64(2**32 - 1)).astype(token_type)
    contexts, entry = np.unique(keys, return_inverse=True)
    totals = np.bincount(entry, counts, len(contexts)).astype(np.int64)
    single = totals[entry] == 1

    many = np.flatnonzero(~single)
    many = many[np.lexsort((successors[many], -counts[many], keys[many]))]
    starts = np.searchsorted(keys[many], contexts[totals > 1])
    ranks = np.arange(len(many)) - starts.repeat(np.diff([*starts, len(many)]))
    many = many[ranks < max_successors]
    counts = counts[many]
    return {
        "keys": contexts[totals > 1],
        "offsets": np.append(np.searchsorted(keys[many], contexts[totals > 1]), len(many)).astype(np.uint32),
        "totals": totals[totals > 1].astype(np.uint32),
        "tokens": successors[many],
        "counts": counts.astype(np.uint16 if counts.max(initial=0) < 2**16 else np.uint32),
        "single_keys": keys[single],
        "single_tokens": successors[single],
    }
