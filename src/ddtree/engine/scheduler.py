"""Which sequences may run at once within a bound of memory for what is kept of their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

from torch import Tensor

from ddtree.engine.prefix_cache import Part
from ddtree.engine.sequence import Sequence
from ddtree.errors import ConfigError, PromptError
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.kv_cache import Holding, token_bytes
from ddtree.sampling.sampler import token_logprobs

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


class Joining:
    """A sequence whose prompt is being processed in a cache of its own, of one row.

    Args:
        sequence: whose prompt it is.
        target: processes it.
        chunk: most tokens of a forward.
        known: what earlier texts left of a prefix of the prompt; at least the last token must be new.

    Attributes:
        cache: the row; the running rows' cache takes it over at the end.
        observed: tokens and features of each part so far, for whoever wants to know the prompt.
        left: prompt tokens still to be processed.
    """

    def __init__(self, sequence: Sequence, target: Any, chunk: int, known: list[Part]) -> None:
        self.sequence = sequence
        self.cache = target.new_cache(sequence.prompt_length)
        self.cache.add_row()
        self.observed: list[tuple[list[int], Tensor | None]] = []
        done = sum(len(part.tokens) for part in known)
        sequence.stats.cached_tokens = done
        self.left = sequence.prompt_length - done
        self._known = known
        every = sequence.prompt_logprobs is not None
        self._chunks = target.prefill(self.cache, 0, sequence.tokens[done:], chunk, every)

    def advance(self) -> Tensor | None:
        """Process the next chunk; after the last one, the logits [V] of what follows the prompt.

        Raises:
            CacheMemoryError: keys and values do not fit into memory.
        """
        for part in self._known:
            self.cache.write(0, part.columns)
            self.observed.append((part.tokens, part.features))
        self._known = []
        tokens, forward = next(self._chunks)
        self.observed.append((tokens, None if forward.features is None else forward.features[0]))
        self._report(len(tokens), forward.logits)
        self.left -= len(tokens)
        return forward.logits[0, -1] if not self.left and forward.logits is not None else None

    def _report(self, count: int, logits: Tensor | None) -> None:
        """Take the log-probabilities of the tokens that follow the next `count` ones, if they are asked for."""
        sequence = self.sequence
        if sequence.prompt_logprobs is None:
            return
        assert logits is not None and sequence.params.prompt_logprobs is not None
        after = sequence.prompt_length - self.left + 1
        for own, token in zip(logits[0], sequence.tokens[after : after + count], strict=False):
            sequence.prompt_logprobs.append(token_logprobs(own, token, sequence.params.prompt_logprobs))
