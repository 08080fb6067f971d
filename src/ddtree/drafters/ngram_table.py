"""Static n-gram tables: what followed each short context in a set of texts; hashed and memory-mapped.

A context is the last 1..max_order tokens. Its 64-bit hash grows to the left (`extend_hash`), so that one pass over a
suffix gives the hashes of all orders; the file keeps the upper 32 bits. Two contexts with the same 32 bits share an
entry, which costs a little acceptance and never changes an answer.

The file is one `.safetensors`. Contexts are in the order of their keys: `keys` holds the lower 16 bits of each, and
`starts` the places where the contexts begin that share the upper 16. Each context has its `sizes` (successors kept,
which are in `tokens` and `counts`, the most frequent first), `totals` (its occurrences) and `kinds` (how many different
tokens followed it, kept or not, at most 64). Numbers but sizes are one byte each, a place in `LEVELS`.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ddtree.errors import CheckpointError, ConfigError
from ddtree.sampling.noise import check_coupling

MAX_ORDER = 8
MAX_SUCCESSORS = 64
FORMAT = "ddtree-ngrams-2"
MULTIPLIER = 0xD1342543DE82EF95  # spreads the low bits of token ids over the upper half of the word
BUCKETS = 2**16
LEVELS = list(accumulate(range(255), lambda level, _: max(level + 1, math.floor(level * 1.09)), initial=1))
"""256 whole numbers from 1 to beyond 2^32: every one of the small, then in steps of at most 9 %."""
DOUBT = 4.0
"""How many occurrences each different successor of a context weighs for a successor not seen yet. Fits held-out
answers best, in likelihood as in acceptance."""
_WORD = 2**64 - 1
_REMEMBERED = 2**15
_BYTE = (np.uint8,)
_DTYPES: dict[str, tuple[Any, ...]] = {
    "starts": (np.uint32,),
    "keys": (np.uint16,),
    "sizes": _BYTE,
    "totals": _BYTE,
    "kinds": _BYTE,
    "tokens": (np.uint16, np.uint32),
    "counts": _BYTE,
}


def extend_hash(word: int, token: int) -> int:
    """Return the hash of a context with `token` put before it; the hash of the empty context is 0."""
    return (word + token + 1) * MULTIPLIER & _WORD


class Successors(NamedTuple):
    """The tokens that followed a context.

    Attributes:
        total: occurrences of the context.
        different: how many different tokens followed it.
        known: sum of `counts`.
        tokens, counts: the most frequent of them, the most frequent first.
    """

    total: int
    different: int
    known: int
    tokens: list[int]
    counts: list[int]


class NgramTable:
    """A table opened from a file; make one with `ddtree.drafters.ngram_builder.build_table`, open it with `load`.

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
        self._cached: dict[tuple[int, int], Successors | None] = {}

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
        try:
            _check_arrays(arrays)
            return NgramTable(arrays, *_settings(metadata))
        except CheckpointError as error:
            raise CheckpointError(f"{path} is damaged: {error}; build it again with `ddtree train`") from None

    def find(self, word: int, most: int = MAX_SUCCESSORS) -> Successors | None:
        """Return what followed the context with this 64-bit hash, the `most` frequent tokens; None if unknown."""
        # A round asks for much of what the last one asked for.
        asked = (word >> 32, most)
        try:
            return self._cached[asked]
        except KeyError:
            if len(self._cached) >= _REMEMBERED:
                self._cached.clear()
            found = self._cached[asked] = self._find(*asked)
            return found

    def successors(self, context: Sequence[int]) -> Successors | None:
        """Return what followed a context of at most `max_order` tokens; None if it is unknown."""
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
        # The sum of rounded counts may exceed their rounded total.
        total = max(LEVELS[self._totals[at]], known)
        return Successors(total, LEVELS[self._kinds[at]], known, tokens, counts)


def _settings(metadata: dict[str, str]) -> tuple[int, tuple[float, float]]:
    """Return a file's longest context and its coupling; raise CheckpointError for damaged ones."""
    try:
        order = int(metadata["max_order"])
        coupling = float(metadata.get("beta", 0)), float(metadata.get("kappa", 1))
    except (KeyError, ValueError):
        raise CheckpointError(f"its settings cannot be read: {metadata}") from None
    try:
        check_coupling(*coupling)
    except ConfigError as error:
        raise CheckpointError(f"its settings are out of range: {error}") from None
    if not 1 <= order <= MAX_ORDER:
        raise CheckpointError(f"its settings are out of range: max_order is {order}")
    return order, coupling


def _check_arrays(arrays: dict[str, NDArray[Any]]) -> None:
    """Raise CheckpointError unless the arrays are sound, so that no lookup can fail later."""
    for name, dtypes in _DTYPES.items():
        if name not in arrays:
            raise CheckpointError(f"it has no {name}")
        if arrays[name].dtype not in dtypes or arrays[name].ndim != 1:
            raise CheckpointError(f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}")
    starts, keys, sizes = arrays["starts"], arrays["keys"], arrays["sizes"]
    if len(starts) != BUCKETS + 1 or starts[0] or starts[-1] != len(keys) or (starts[1:] < starts[:-1]).any():
        raise CheckpointError("starts and keys do not fit together")
    if not len(keys) == len(sizes) == len(arrays["totals"]) == len(arrays["kinds"]):
        raise CheckpointError("keys, sizes, totals and kinds differ in length")
    if not len(arrays["tokens"]) == len(arrays["counts"]) == int(sizes.sum(dtype=np.int64)):
        raise CheckpointError("sizes, tokens and counts do not fit together")
    rising = np.ones(len(keys), np.bool_)
    rising[1:] = keys[1:] > keys[:-1]
    rising[starts[:-1][starts[:-1] < len(keys)]] = True
    if not rising.all():
        raise CheckpointError("keys is not in order")
