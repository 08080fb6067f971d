"""A prompt on its way in: processed a chunk at a time, beside the rows that are running."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ddtree.prefixes import Part
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
        self._chunks = target.prefill(self.cache, 0, sequence.tokens[done:], chunk)

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
        self.left -= len(tokens)
        return None if forward.logits is None else forward.logits[0, -1]
