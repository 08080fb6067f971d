"""Which sequences may run at once within a bound of memory for what is kept of their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

from ddtree.autoregressive import AutoregressiveTarget
from ddtree.errors import ConfigError, PromptError
from ddtree.holding import Holding, token_bytes
from ddtree.sequence import Sequence

_SPARE = 64
"""Columns for drafted nodes beside the longest that a row can become. Shorter rows leave more."""


class Admission:
    """Admits sequences only if all that is kept of the tokens that they and the running ones can come to fits.

    Counted are keys and values of the target and of the drafters, as buffers in their real shape, of so many rows and
    so many tokens each; the cache in which the prompt is processed; and the features that wait for a drafter or for
    the prefix store. Not counted are weights, what a forward pass needs while it runs, and the copy of the buffers
    that there is for a moment when they grow.

    Args:
        target: with the feature layers that the drafter needs; is run once, to see how large a token is.
        cache: that of the target's running rows.
        limit: bytes.
        drafters: what the drafters keep.
        features_stay: the features of an answer are kept until it ends.

    Attributes:
        limit: as given.

    Raises:
        ConfigError: the target keeps its own caches, which cannot be bounded, or `limit` is too small for any text.
    """

    def __init__(
        self,
        target: Any,
        cache: Any,
        limit: int,
        drafters: Several[Holding] = (),
        features_stay: bool = False,
    ) -> None:
        if isinstance(target, AutoregressiveTarget):
            raise ConfigError(
                f"cache_bytes={limit} cannot bound the caches that {type(target.model).__name__} makes for itself: "
                "leave it out and choose max_rows instead"
            )
        self.limit = limit
        self._most = target.max_context
        self._target = Holding(cache, lambda: token_bytes(target), _SPARE, self._most)
        self._drafters = drafters
        feature = len(target.feature_layers) * target.hidden_size * target.dtype.itemsize
        self._prompt_token = self._target.token + feature
        self._answer_token = feature if features_stay else 0
        self._rows = self._longest = self._rest = 0
        least = self._bytes([(1, 1)])
        if least > limit:
            raise ConfigError(f"cache_bytes={limit} is too little for any text: give at least {least} bytes")

    def check(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptError for what could not even run alone."""
        need = self._bytes([(prompt_length, max_tokens)])
        if need > self.limit:
            drafters = " with the drafter's" if self._drafters else ""
            raise PromptError(
                f"a prompt of {prompt_length} tokens with an answer of up to {max_tokens} needs {need / 2**20:.1f} MiB "
                f"of keys and values{drafters}, and cache_bytes allows {self.limit / 2**20:.1f} MiB: shorten the "
                "prompt, lower max_tokens, or raise cache_bytes"
            )

    def admit(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Whether a sequence may join those running."""
        texts = [(one.prompt_length, one.params.max_tokens) for one in (*running, sequence)]
        need = self._bytes(texts)
        if need > self.limit:
            return False
        self._rows, self._longest = len(texts), self._longest_of(texts)
        self._rest = self.limit - need
        return True

    def confine(self) -> None:
        """Make room in the buffers of the running rows for the sequence admitted last.

        Raises:
            CacheMemoryError: the device has no room for smaller buffers beside the old ones.
        """
        self._target.confine(self._rows, self._longest, self._rest)
        for holding in self._drafters:
            holding.confine(self._rows, self._longest)

    def nodes(self, longest: int) -> int:
        """Drafted nodes that each row has room for beside the longest one, of so many committed tokens."""
        _, columns = self._target.shape(self._rows, self._longest)
        # Recorded passes may add half as many.
        return (columns - longest) * 2 // 3 - 1

    def _longest_of(self, texts: list[tuple[int, int]]) -> int:
        return max(min(prompt + answer, self._most) for prompt, answer in texts)

    def _bytes(self, texts: list[tuple[int, int]]) -> int:
        """Of texts, as most tokens of prompt and answer, of which the last one's prompt is still to be processed."""
        rows, longest = len(texts), self._longest_of(texts)
        buffers = sum(holding.bytes(rows, longest) for holding in (self._target, *self._drafters))
        answers = sum(min(answer, self._most - prompt) for prompt, answer in texts)
        return buffers + self._prompt_token * texts[-1][0] + self._answer_token * answers
