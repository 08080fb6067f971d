"""Which sequences may run at once within a bound of memory for keys and values."""

from __future__ import annotations

from typing import Any

from ddtree.autoregressive import AutoregressiveTarget
from ddtree.cache import KVCache
from ddtree.errors import ConfigError, PromptError
from ddtree.sequence import Sequence

_SPARE = 64
"""Columns for drafted nodes beside the longest that a row can become. Shorter rows leave more."""


class Admission:
    """Admits sequences only if all keys and values that they and the running ones can come to fit into the bound.

    Counted are the buffers in their real shape, of so many rows and so many tokens each, and the cache in which the
    prompt is processed. Not counted is the copy of the buffers that there is for a moment when they grow.

    Args:
        target: is run once, to see how large a token is.
        limit: bytes.

    Attributes:
        limit: as given.
        columns: most columns that a row may have, drafted nodes included, until the next sequence is admitted.

    Raises:
        ConfigError: the target keeps its own caches, which cannot be bounded, or `limit` is too small for any text.
    """

    def __init__(self, target: Any, limit: int) -> None:
        if isinstance(target, AutoregressiveTarget):
            raise ConfigError(
                f"cache_bytes={limit} cannot bound the caches that {type(target.model).__name__} makes for itself: "
                "leave it out and choose max_rows instead"
            )
        self.limit = limit
        self.columns = 0
        self._rows = 0
        self._most = target.max_context
        # The cache's shapes are what is asked for; it holds nothing.
        self._shapes: KVCache = target.new_cache()
        probe = target.new_cache(1)
        for _ in target.prefill(probe, probe.add_row(), [0]):
            pass
        self._token = probe.token_bytes
        if self._bytes(1, 2, 1) > limit:
            raise ConfigError(
                f"cache_bytes={limit} is too little for any text: give at least {self._bytes(1, 2, 1)} bytes"
            )

    def check(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptError for what could not even run alone."""
        need = self._bytes(1, self._longest(prompt_length, max_tokens), prompt_length)
        if need > self.limit:
            raise PromptError(
                f"a prompt of {prompt_length} tokens with an answer of up to {max_tokens} needs {need / 2**20:.1f} MiB "
                f"of keys and values, and cache_bytes allows {self.limit / 2**20:.1f} MiB: shorten the prompt, lower "
                "max_tokens, or raise cache_bytes"
            )

    def admit(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Whether a sequence may join those running."""
        longest = max(self._longest(one.prompt_length, one.params.max_tokens) for one in (*running, sequence))
        if self._bytes(len(running) + 1, longest, sequence.prompt_length) > self.limit:
            return False
        self._rows, self.columns = self._shapes.shape(len(running) + 1, longest + _SPARE)
        return True

    def confine(self, cache: KVCache, sequence: Sequence) -> None:
        """Make room in the buffers of the running rows for the sequence admitted last.

        Raises:
            CacheMemoryError: the device has no room for smaller buffers beside the old ones.
        """
        cache.confine(self._rows, self.columns, self.limit - self._token * sequence.prompt_length)

    def _longest(self, prompt_length: int, max_tokens: int) -> int:
        return min(prompt_length + max_tokens, self._most)

    def _bytes(self, rows: int, longest: int, prompt_length: int) -> int:
        """Of rows of so many tokens, and of a prompt beside them."""
        width, columns = self._shapes.shape(rows, longest + _SPARE)
        return self._token * (width * columns + prompt_length)
