"""A prompt on its way in: processed a chunk at a time, beside the rows that are running."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ddtree.prefixes import Part
from ddtree.sampling import token_logprobs
from ddtree.sequence import Sequence


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
