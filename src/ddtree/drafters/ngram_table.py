"""Static n-gram tables: what followed each short context in a set of texts; hashed and memory-mapped.

A context is the last 1..max_order tokens. Its 64-bit hash grows to the left (`extend_hash`), so that one pass over a
suffix gives the hashes of all orders; the file keeps the upper 32 bits. Two contexts with the same 32 bits share an
entry, which costs a little acceptance and never an answer.

The file is one `.safetensors`. Contexts stand in the order of their keys: `keys` holds the lower 16 bits of each, and
`starts` where the contexts begin that share the upper 16. For each context there are its `sizes` (successors kept,
which stand in `tokens` and `counts`, the most frequent first), `totals` (how often it was seen) and `kinds` (how many
different tokens followed it, kept or not, at most 64). Numbers but sizes are one byte each, a place in `LEVELS`.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ddtree.errors import CheckpointError

MAX_ORDER = 8
MAX_SUCCESSORS = 64
FORMAT = "ddtree-ngrams-2"
MULTIPLIER = 0xD1342543DE82EF95  # spreads the low bits of token ids over the upper half of the word
BUCKETS = 2**16
_WORD = 2**64 - 1
_REMEMBERED = 2**15


def _levels() -> list[int]:
    """256 whole numbers from 1 to beyond 2^32: every one of the small, then in steps of at most 9 %."""
    steps = accumulate(range(255), lambda level, _: max(level + 1, math.floor(level * 1.09)), initial=1)
    return list(steps)


LEVELS = _levels()


def extend_hash(word: int, token: int) -> int:
    """The hash of a context with `token` put before it; the hash of the empty context is 0."""
    return (word + token + 1) * MULTIPLIER & _WORD


class Successors(NamedTuple):
    """What followed a context: how often in all, how many different tokens, and the most frequent of them.

    `known` is the sum of their counts.
    """

    total: int
    different: int
    known: int
    tokens: list[int]
    counts: list[int]


class NgramTable:
    """A table opened from a file; make one with `ddtree.drafters.ngram_counts.build_table`, open it with `load`.

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
        self.contexts = len(arrays["keys"])
        self.vocab_size = 1 + int(arrays["tokens"].max(initial=0))
        offsets = np.zeros(self.contexts + 1, np.uint32)
        np.cumsum(arrays["sizes"], out=offsets[1:])
        self._offsets = offsets.data
        self._starts: list[int] = arrays["starts"].tolist()
        self._keys, self._totals, self._kinds = (arrays[name].data for name in ("keys", "totals", "kinds"))
        self._tokens, self._counts = arrays["tokens"].data, arrays["counts"].data
        self._lately: dict[tuple[int, int], Successors | None] = {}

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
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is no n-gram table of this version (format {metadata.get('format')!r}, not {FORMAT!r}): "
                "build it again with `ddtree train`"
            )
        fault = _fault(arrays)
        try:
            order = int(metadata["max_order"])
            coupling = float(metadata.get("beta", 0)), float(metadata.get("kappa", 1))
            if not (1 <= order <= MAX_ORDER and can_couple(*coupling)):
                fault = f"its settings are out of range: {metadata}"
        except (KeyError, ValueError):
            fault = f"its settings cannot be read: {metadata}"
        if fault:
            raise CheckpointError(f"{path} is damaged: {fault}; build it again with `ddtree train`")
        return NgramTable(arrays, order, coupling)

    def find(self, word: int, most: int = MAX_SUCCESSORS) -> Successors | None:
        """What followed the context with this 64-bit hash, the `most` frequent tokens; None for an unknown one."""
        # A round asks for much of what the last one asked for.
        asked = (word >> 32, most)
        try:
            return self._lately[asked]
        except KeyError:
            if len(self._lately) >= _REMEMBERED:
                self._lately.clear()
            found = self._lately[asked] = self._find(*asked)
            return found

    def successors(self, context: Sequence[int]) -> Successors | None:
        """What followed a context of at most `max_order` tokens; None for an unknown one."""
        word = 0
        for token in reversed(context):
            word = extend_hash(word, token)
        return self.find(word)

    def _find(self, key: int, most: int) -> Successors | None:
        bucket, low = divmod(key, BUCKETS)
        stop = self._starts[bucket + 1]
        at = bisect_left(self._keys, low, self._starts[bucket], stop)
        if at == stop or self._keys[at] != low:
            return None
        start, end = self._offsets[at], self._offsets[at + 1]
        part = slice(start, min(end, start + most))
        tokens, counts = self._tokens[part].tolist(), [LEVELS[code] for code in self._counts[part]]
        known = sum(counts)
        # Rounded counts may come to more than their rounded total.
        total = max(LEVELS[self._totals[at]], known)
        return Successors(total, LEVELS[self._kinds[at]], known, tokens, counts)


def can_couple(beta: float, kappa: float) -> bool:
    """Whether a noise coupling is in range."""
    return 0 <= beta < math.inf and 0 < kappa < math.inf


def _fault(arrays: dict[str, NDArray[Any]]) -> str:
    """What makes the arrays unusable, so that no lookup can fail later; empty when they are sound."""
    byte, small = (np.uint8,), (np.uint16, np.uint32)
    kinds: dict[str, tuple[Any, ...]] = {
        "starts": (np.uint32,),
        "keys": (np.uint16,),
        "sizes": byte,
        "totals": byte,
        "kinds": byte,
    }
    kinds |= {"tokens": small, "counts": byte}
    for name, dtypes in kinds.items():
        if name not in arrays:
            return f"it has no {name}"
        if arrays[name].dtype not in dtypes or arrays[name].ndim != 1:
            return f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}"
    starts, keys, sizes = arrays["starts"], arrays["keys"], arrays["sizes"]
    if len(starts) != BUCKETS + 1 or starts[0] or starts[-1] != len(keys) or (starts[1:] < starts[:-1]).any():
        return "starts and keys do not fit together"
    if not len(keys) == len(sizes) == len(arrays["totals"]) == len(arrays["kinds"]):
        return "keys, sizes, totals and kinds differ in length"
    if not len(arrays["tokens"]) == len(arrays["counts"]) == int(sizes.sum(dtype=np.int64)):
        return "sizes, tokens and counts do not fit together"
    rising = np.ones(len(keys), np.bool_)
    rising[1:] = keys[1:] > keys[:-1]
    rising[starts[:-1][starts[:-1] < len(keys)]] = True
    return "" if rising.all() else "keys is not in order"


DOUBT = 4.0  # fits held-out answers best, in likelihood as in acceptance
_WIDTH = 16  # successors looked at of one suffix: the newest of the row's own, the most frequent of the table
_NEGLIGIBLE = 1e-3  # shorter suffixes are not asked when less than this is left for them


class Index:
    """The n-grams of one row's text, taken in as it grows.

    A context maps to its successor when it was seen once, else to [times seen], {successor: count}, where the
    successor seen last stands last.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        self.length = 0
        self._tail: list[int] = []
        self.entries: dict[int, int | tuple[list[int], dict[int, int]]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens`, the whole text, has beyond what was seen of it."""
        entries, order = self.entries, self.order
        for at in range(self.length, len(tokens)):
            token, word = tokens[at], 0
            for before in range(at - 1, max(at - 1 - order, -1), -1):
                word = extend_hash(word, tokens[before])
                entry = entries.get(word)
                if entry is None:
                    entries[word] = token
                    continue
                if isinstance(entry, int):
                    entry = entries[word] = ([1], {entry: 1})
                entry[0][0] += 1
                entry[1][token] = entry[1].pop(token, 0) + 1
        self.length = len(tokens)
        self._tail = list(tokens[-order:])

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` goes on from the text seen so far, as far as its end tells."""
        return tokens[max(0, self.length - self.order) : self.length] == self._tail


def successors(
    context: Sequence[int], index: Index, table: NgramTable | None, weight: float
) -> tuple[dict[int, float], float]:
    """Probabilities of the known tokens after a context, and of all unknown ones together.

    The tokens stand in the order of their first sight: the longest suffix first, within one the newest.

    Args:
        context: the last tokens, no more than the index's order.
        index: the row's own text.
        table: counts of other texts.
        weight: how much one sight in the own text counts against one in the table.
    """
    entries, word, found = index.entries, 0, []
    for token in reversed(context):
        word = extend_hash(word, token)
        own, static = entries.get(word), table.find(word, _WIDTH) if table else None
        if own is not None or static is not None:
            found.append((own, static))
    scores: dict[int, float] = {}
    left = 1.0
    for own, static in reversed(found):
        total, different = (static.total, static.different) if static else (0, 1)
        if isinstance(own, int):
            share = left / (total + weight + DOUBT * different)
            scores[own] = scores.get(own, 0.0) + share * weight
            left -= share * weight
        elif own is not None:
            seen, successors = own
            share = left / (total + weight * seen[0] + DOUBT * max(different, len(successors)))
            for token, count in islice(reversed(successors.items()), _WIDTH):
                scores[token] = scores.get(token, 0.0) + share * weight * count
            left -= share * weight * seen[0]
        else:
            share = left / (total + DOUBT * different)
        if static:
            for token, count in zip(static.tokens, static.counts, strict=True):
                scores[token] = scores.get(token, 0.0) + share * count
            left -= share * static.known
        if left < _NEGLIGIBLE:
            break
    return scores, left
