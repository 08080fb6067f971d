"""Prompt lookup: n-grams of the row's own text, and of a static table if there is one, grown into a tree. No model.

The probability of a token after a context is a back-off mix over the context's suffixes, the longest first: the
suffix of k tokens, seen s times, speaks for s / (s + 1) of what the longer ones left over. What is left after the
shortest stays with the tokens never seen here, so that scores are honest where evidence is thin.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.ngrams import MAX_ORDER, NgramTable, extend_hash
from ddtree.errors import CheckpointError, ConfigError
from ddtree.noise import Noise, couple
from ddtree.stats import Clock
from ddtree.tree import MAX_DEPTH, DraftTree

_WIDTH = 24  # successors looked at of one suffix: the newest of the row's own, the most frequent of the table
_NEGLIGIBLE = 1e-3  # shorter suffixes are not asked when less than this is left for them

PLAIN = (0.0, 1.0)

Candidates = list[tuple[int, float]]
Entries = dict[int, int | tuple[list[int], dict[int, int]]]


class _Index:
    """The n-grams of one row's text.

    A context maps to its successor when it has been seen once, else to [times seen, {successor: count}], the
    successor seen last standing last.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        self.length = 0
        self.tail: list[int] = []
        self.entries: Entries = {}

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
        self.tail = list(tokens[-order:])

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` goes on from the text seen so far."""
        return tokens[max(0, self.length - self.order) : self.length] == self.tail


class Lookup:
    """Drafts what followed the same tokens before, best first under each row's budget.

    Args:
        table: counts of other texts, such as the target's own answers; None uses the row's text alone.
        vocab_size: the target's; a table with higher ids is refused.
        order: longest context.
        weight: how much one sight in the row's own text counts against one in the table.
        coupling: (beta, kappa) of noise-coupled drafting; (0, 1) drafts without looking at the noise.
        device: where the trees are wanted.

    Raises:
        ConfigError: an argument is out of range.
        CheckpointError: the table was made with another vocabulary.
    """

    name = "lookup"
    feature_layers: tuple[int, ...] = ()
    max_depth = MAX_DEPTH

    def __init__(
        self,
        table: NgramTable | None = None,
        *,
        vocab_size: int | None = None,
        order: int = 5,
        weight: float = 3.0,
        coupling: tuple[float, float] = PLAIN,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= order <= MAX_ORDER:
            raise ConfigError(f"order={order} is outside 1..{MAX_ORDER}: give a whole number in that range")
        if not 0 < weight < math.inf:
            raise ConfigError(f"weight={weight} must be positive and finite")
        if table is not None and vocab_size is not None and table.vocab_size > vocab_size:
            raise CheckpointError(
                f"the n-gram table holds token id {table.vocab_size - 1} and the target has {vocab_size} tokens: "
                "build a table from the target's own answers"
            )
        couple(torch.zeros(1), torch.zeros(1), *coupling)  # refuses values out of range
        self.table = table
        self.order = order
        self.weight = weight
        self.coupling = coupling
        self.device = torch.device(device)
        self._rows: list[_Index] = []

    def add_row(self) -> None:
        self._rows.append(_Index(self.order))

    def drop_row(self, row: int) -> None:
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Nothing to do: `DraftRow.tokens` tells all, the bonus token included."""

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        for index, row in enumerate(rows):
            if not self._rows[index].follows(row.tokens):
                self._rows[index] = _Index(self.order)
            self._rows[index].extend(row.tokens)
        with clock("build"):
            grown = [_Grown(self, index.entries, row) for index, row in zip(self._rows, rows, strict=True)]
            return self._assemble(grown)

    def _assemble(self, grown: list[_Grown]) -> DraftTree:
        sizes = [len(tree.tokens) for tree in grown]
        width = max(sizes)

        def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
            lists = [getattr(tree, name) for tree in grown]
            padded = [values + [fill] * (width - len(values)) for values in lists]
            return torch.tensor(padded, dtype=dtype, device=self.device)

        return DraftTree(
            column("tokens", 0, torch.int64),
            column("parents", 0, torch.int64),
            column("depths", 0, torch.int64),
            column("logprobs", -math.inf, torch.float32),
            sizes,
        )


class _Grown:
    """The tree of one row, grown best first: nodes in the order of their score, ties by depth, then rank."""

    def __init__(self, drafter: Lookup, entries: Entries, row: DraftRow) -> None:
        self._drafter = drafter
        self._entries = entries
        self._row = row
        self.tokens, self.parents, self.depths, self.logprobs = [row.tokens[-1]], [0], [0], [0.0]
        self._contexts = [row.tokens[-drafter.order :]]
        self._noise = None if drafter.coupling == PLAIN else row.noise
        if row.chain:
            self._grow_chain()
        elif row.budget and row.depth:
            self._grow()

    def _grow(self) -> None:
        # One entry stands for a node's children from some rank on: (score, depth, rank, parent, children).
        waiting: list[tuple[float, int, int, int, Candidates]] = []
        node, budget, depth = 0, self._row.budget, self._row.depth
        while True:
            if self.depths[node] < depth:
                children = self._children(node)
                if children:
                    heapq.heappush(waiting, self._entry(node, 0, children))
            if not waiting or node == budget:
                return
            _, _, rank, parent, children = waiting[0]
            token, logprob = children[rank]
            if rank + 1 < len(children):
                heapq.heapreplace(waiting, self._entry(parent, rank + 1, children))
            else:
                heapq.heappop(waiting)
            node = self._append(parent, token, logprob)

    def _entry(self, parent: int, rank: int, children: Candidates) -> tuple[float, int, int, int, Candidates]:
        return -(self.logprobs[parent] + children[rank][1]), self.depths[parent] + 1, rank, parent, children

    def _grow_chain(self) -> None:
        for node in range(min(self._row.budget, self._row.depth)):
            children = self._children(node)
            if not children:
                return
            self._append(node, *children[0])

    def _append(self, parent: int, token: int, logprob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.logprobs.append(self.logprobs[parent] + logprob)
        self._contexts.append([*self._contexts[parent], token][-self._drafter.order :])
        return len(self.tokens) - 1

    def _children(self, node: int) -> Candidates:
        """Known tokens after a node with their log-probabilities, best first; ties by longest suffix, then newest."""
        scores, unknown = self._mix(self._contexts[node])
        if self._noise is None:
            ranked = sorted(scores.items(), key=itemgetter(1), reverse=True)
            return [(token, math.log(score)) for token, score in ranked]
        return self._couple(scores, unknown, self._noise, len(self._row.tokens) + self.depths[node])

    def _mix(self, context: list[int]) -> tuple[dict[int, float], float]:
        """Probabilities of the known tokens after a context, and of all unknown ones together."""
        table, entries, weight = self._drafter.table, self._entries, self._drafter.weight
        word, found = 0, []
        for token in reversed(context):
            word = extend_hash(word, token)
            own, static = entries.get(word), table.find(word) if table else None
            if own is None and static is None:
                break
            found.append((own, static))
        scores: dict[int, float] = {}
        left = 1.0
        for own, static in reversed(found):
            mass = static.total if static else 0.0
            if own is not None:
                mass += weight * (1 if isinstance(own, int) else own[0][0])
            left /= mass + 1
            if isinstance(own, int):
                scores[own] = scores.get(own, 0.0) + left * weight
            elif own is not None:
                for token, count in islice(reversed(own[1].items()), _WIDTH):
                    scores[token] = scores.get(token, 0.0) + left * weight * count
            if static:
                for token, count in zip(static.tokens[:_WIDTH], static.counts, strict=False):
                    scores[token] = scores.get(token, 0.0) + left * count
            if left < _NEGLIGIBLE:
                break
        return scores, left

    def _couple(self, scores: dict[int, float], unknown: float, noise: Noise, position: int) -> Candidates:
        """The known tokens ranked under the row's noise; the unknown ones compete as one, with its mean noise."""
        if not scores:
            return []
        tokens = torch.tensor(list(scores), device=noise.device)
        gumbel = noise.gumbel(position, tokens).cpu()
        logq = torch.tensor([*scores.values(), unknown]).log()
        mean = torch.tensor([0.5772])
        coupled = couple(logq, torch.cat([gumbel, mean]), *self._drafter.coupling)[:-1]
        values, order = coupled.sort(descending=True, stable=True)
        return [(token, value) for token, value in zip(tokens[order].tolist(), values.tolist(), strict=True)]
