"""Which tokens may follow a context, by the n-grams of a row's own text and of a static table.

The probability of a token is a back-off mix over the context's suffixes, the longest first: one that was seen with
mass s, before u different tokens, speaks for s / (s + 4 u) of what the longer ones left over (Witten and Bell's
estimate, IEEE Trans. Inf. Theory 37, 1991, with more doubt). What is left after the shortest stays with the tokens
never seen there. On held-out greedy answers these probabilities come true about as often as they say, so they may
compete with other drafters' for one budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ddtree.drafters.ngrams import NgramTable, extend_hash

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
