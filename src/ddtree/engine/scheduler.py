"""Decide which sequences wait, are prefilled and run, within a bound of KV memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from typing import Any

from torch import Tensor

from ddtree.engine.prefix_cache import Part, PrefixCache
from ddtree.engine.sequence import Sequence
from ddtree.errors import ConfigError, PromptError
from ddtree.model import TargetModel
from ddtree.model.kv_cache import KVFootprint, token_bytes
from ddtree.sampling.sampler import token_logprobs

_SPARE = 64
"""Columns for drafted nodes beside the longest row at its full length. Half as many would cut wide trees of the
longest row near its end; twice as many take memory from every row. Shorter rows leave more."""


class KVBudget:
    """Admits a sequence only if its worst-case KV memory fits beside that of the running ones.

    Counted are keys and values of the target and of the drafters, in the real shape of their buffers, for every row at
    its full length (prompt and `max_tokens`); the cache of the prompt in prefill; and features kept for a drafter or
    for the prefix cache. Not counted are weights, activations of a forward pass, and the second copy of a buffer
    while it grows.

    Args:
        target: with the feature layers that the drafter needs; it is run once, to measure the size of a token.
        cache: the cache of the target's running rows.
        limit: bytes, as in 2 * 2**30.
        drafters: KV footprints of the drafters.
        features_stay: the features of an answer are kept until it ends.

    Attributes:
        limit: as given.

    Raises:
        ConfigError: the target keeps its own caches, which cannot be bounded, or `limit` is too small for any text.
    """

    def __init__(
        self,
        target: TargetModel,
        cache: Any,
        limit: int,
        drafters: Several[KVFootprint] = (),
        features_stay: bool = False,
    ) -> None:
        if not target.verifies_trees:
            raise ConfigError(
                f"cache_bytes={limit} cannot bound the caches that {type(target.model).__name__} makes for itself: "
                "leave it out and choose max_rows instead"
            )
        self.limit = limit
        self._most = target.max_context
        self._target = KVFootprint(cache, lambda: token_bytes(target), _SPARE, self._most)
        self._drafters = drafters
        feature = len(target.feature_layers) * target.hidden_size * target.dtype.itemsize
        self._prompt_token = self._target.token + feature
        self._answer_token = feature if features_stay else 0
        self._rows = self._longest = self._rest = 0
        least = self._bytes([(1, 1)])
        if least > limit:
            raise ConfigError(f"cache_bytes={limit} is too little for any text: give at least {least} bytes")

    def check(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptError for a prompt that could not even run alone."""
        need = self._bytes([(prompt_length, max_tokens)])
        if need > self.limit:
            drafters = " with the drafter's" if self._drafters else ""
            raise PromptError(
                f"a prompt of {prompt_length} tokens with an answer of up to {max_tokens} needs {need / 2**20:.1f} MiB "
                f"of keys and values{drafters}, and cache_bytes allows {self.limit / 2**20:.1f} MiB: shorten the "
                "prompt, lower max_tokens, or raise cache_bytes"
            )

    def can_admit(self, running: list[Sequence], sequence: Sequence) -> bool:
        """Return whether a sequence may join those running. If so, `reserve` makes room for it."""
        texts = [(one.prompt_length, one.params.max_tokens) for one in (*running, sequence)]
        need = self._bytes(texts)
        if need > self.limit:
            return False
        self._rows, self._longest = len(texts), self._longest_of(texts)
        self._rest = self.limit - need
        return True

    def reserve(self) -> None:
        """Make room in the buffers of the running rows for the sequence admitted last.

        Raises:
            CacheMemoryError: the device has no room for smaller buffers beside the old ones.
        """
        self._target.shrink_to(self._rows, self._longest, self._rest)
        for footprint in self._drafters:
            footprint.shrink_to(self._rows, self._longest)

    def max_draft_nodes(self, lengths: list[int]) -> int:
        """Return how many drafted nodes each row has room for; `lengths` are the rows' committed tokens."""
        _, columns = self._target.shape(self._rows, self._longest)
        # Recorded passes (CUDA graphs) pad a tree by up to half of its nodes.
        return (columns - max(lengths)) * 2 // 3 - 1

    def _longest_of(self, texts: list[tuple[int, int]]) -> int:
        return max(min(prompt + answer, self._most) for prompt, answer in texts)

    def _bytes(self, texts: list[tuple[int, int]]) -> int:
        """Return the memory of texts (prompt tokens, max_tokens); the last one's prompt is still to be prefilled."""
        rows, longest = len(texts), self._longest_of(texts)
        buffers = sum(footprint.bytes(rows, longest) for footprint in (self._target, *self._drafters))
        answers = sum(min(answer, self._most - prompt) for prompt, answer in texts)
        return buffers + self._prompt_token * texts[-1][0] + self._answer_token * answers


class ChunkedPrefill:
    """Processes the prompt of one sequence chunk by chunk, in a cache of its own.

    Args:
        sequence: whose prompt it is.
        target: processes it.
        chunk: most tokens of a forward pass, as in 512.
        cached: parts of the prompt from the prefix cache, first to last; at least the last token must be new.

    Attributes:
        cache: of one row; the running rows' cache takes it over at the end.
        observed: tokens and features of each part so far, for the drafter and the prefix cache.
        left: prompt tokens still to be processed.
    """

    def __init__(self, sequence: Sequence, target: TargetModel, chunk: int, cached: list[Part]) -> None:
        self.sequence = sequence
        self.cache = target.new_cache(sequence.prompt_length)
        self.cache.add_row()
        self.observed: list[tuple[list[int], Tensor | None]] = []
        done = sum(len(part.tokens) for part in cached)
        sequence.stats.cached_tokens = done
        self.left = sequence.prompt_length - done
        self._cached = cached
        every = sequence.prompt_logprobs is not None
        self._chunks = target.prefill(self.cache, 0, sequence.tokens[done:], chunk, every)

    def advance(self) -> Tensor | None:
        """Process the next chunk; after the last one, return the logits [V] of the prompt's last token.

        Raises:
            CacheMemoryError: keys and values do not fit into memory.
        """
        for part in self._cached:
            self.cache.write(0, part.columns)
            self.observed.append((part.tokens, part.features))
        self._cached = []
        tokens, forward = next(self._chunks)
        self.observed.append((tokens, None if forward.features is None else forward.features[0]))
        self._take_logprobs(len(tokens), forward.logits)
        self.left -= len(tokens)
        return forward.logits[0, -1] if not self.left and forward.logits is not None else None

    def _take_logprobs(self, count: int, logits: Tensor | None) -> None:
        """Keep the log-probabilities of the tokens that follow the next `count` ones, if they are asked for."""
        sequence = self.sequence
        if sequence.prompt_logprobs is None:
            return
        assert logits is not None and sequence.params.prompt_logprobs is not None
        after = sequence.prompt_length - self.left + 1
        for own, token in zip(logits[0], sequence.tokens[after : after + count], strict=False):
            sequence.prompt_logprobs.append(token_logprobs(own, token, sequence.params.prompt_logprobs))


class Scheduler:
    """Keeps the sequences of an engine: waiting, in prefill, running.

    Args:
        target: processes the prompts.
        max_rows: most sequences running at once.
        prefill_chunk: prompt tokens of a forward pass, as in 512.
        budget: bounds the KV memory; None for no bound.
        prefixes: gives the parts of a prompt that are known; None to process prompts whole.

    Attributes:
        waiting: sequences whose prompt has not been touched, in order.
        prefill: the prompt being processed, or None.
        running: sequences with a row, in the rows' order.
        rows_waited: the running rows have waited for a chunk of a prompt since their last round.
    """

    def __init__(
        self,
        target: TargetModel,
        max_rows: int,
        prefill_chunk: int,
        budget: KVBudget | None,
        prefixes: PrefixCache | None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.prefill: ChunkedPrefill | None = None
        self.running: list[Sequence] = []
        self.rows_waited = False
        self._target = target
        self._max_rows = max_rows
        self._prefill_chunk = prefill_chunk
        self._budget = budget
        self._prefixes = prefixes

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not left: running, in prefill, waiting."""
        prefill = [] if self.prefill is None else [self.prefill.sequence]
        return [*self.running, *prefill, *self.waiting]

    def round_is_next(self) -> bool:
        """Return whether a round is next, rather than a chunk of a prompt. Where there is both, they take turns.

        Begins the first waiting prompt where there is a row and memory for it.
        """
        return bool(self.running) and (self.rows_waited or self.next_prefill() is None)

    def next_prefill(self) -> ChunkedPrefill | None:
        """Return the prompt being processed, or begin the first waiting one if there is a row and memory for it."""
        if self.prefill is None and self.waiting and len(self.running) < self._max_rows:
            sequence = self.waiting[0]
            if self._budget is None or self._budget.can_admit(self.running, sequence):
                self.waiting.popleft()
                cached: list[Part] = []
                if self._prefixes is not None and sequence.prompt_logprobs is None:
                    # The last token is processed in any case, for its logits.
                    cached = self._prefixes.find(sequence.tokens[:-1])
                self.prefill = ChunkedPrefill(sequence, self._target, self._prefill_chunk, cached)
        return self.prefill

    def finish_cancelled(self) -> None:
        """End what was cancelled during a step, and forget ended sequences that have no row."""
        for sequence in self.sequences:
            if sequence.cancelled and sequence.finish_reason is None:
                sequence.finish("cancelled")
            if sequence.finish_reason is not None and sequence in self.waiting:
                self.waiting.remove(sequence)
        if self.prefill is not None and self.prefill.sequence.finish_reason is not None:
            self.prefill = None
