"""Prompt lookup: what followed the same tokens before, in the row's own text or in a static table. No model."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from operator import itemgetter

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.backoff import Index, successors
from ddtree.drafters.ngrams import MAX_ORDER, NgramTable
from ddtree.errors import CheckpointError, ConfigError
from ddtree.noise import Noise, couple
from ddtree.rows import drop_row
from ddtree.stats import Clock
from ddtree.tree import MAX_DEPTH, DraftTree

PLAIN = (0.0, 1.0)
_MEAN_GUMBEL = 0.5772

Candidates = list[tuple[int, float]]


class Lookup:
    """Drafts with n-grams, best first under each row's budget; the probabilities are `ddtree.drafters.backoff`'s.

    Args:
        table: counts of other texts, such as the target's own answers; None uses the row's text alone.
        vocab_size: the target's; a table with higher ids is refused.
        order: longest context, 1..8.
        weight: how much one sight in the row's own text counts against one in the table.
        coupling: (beta, kappa) of noise-coupled drafting; the table's own by default. (0, 1) drafts without looking
            at the noise, as is done without a table: a text alone knows too few tokens to rank.
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
        weight: float = 6.0,
        coupling: tuple[float, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= order <= MAX_ORDER:
            raise ConfigError(f"order={order} is outside 1..{MAX_ORDER}: give a whole number in that range")
        if not 0 < weight < math.inf:
            raise ConfigError(f"weight={weight} is not a positive finite number")
        if table is not None and vocab_size is not None and table.vocab_size > vocab_size:
            raise CheckpointError(
                f"the n-gram table holds token id {table.vocab_size - 1} and the target has {vocab_size} tokens: "
                "build a table from the target's own answers"
            )
        if coupling is None:
            coupling = PLAIN if table is None else table.coupling
        couple(torch.zeros(1), torch.zeros(1), *coupling)  # refuses values out of range
        self.table = table
        self.order = order
        self.weight = weight
        self.coupling = coupling
        self.device = torch.device(device)
        self._rows: list[Index] = []

    def add_row(self) -> None:
        self._rows.append(Index(self.order))

    def drop_row(self, row: int) -> None:
        drop_row(self._rows, row)

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Nothing to do: `DraftRow.tokens` tells all, the bonus token included."""

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        for index, row in enumerate(rows):
            if not self._rows[index].follows(row.tokens):
                self._rows[index] = Index(self.order)
            self._rows[index].extend(row.tokens)
        with clock("build"):
            return _stacked([self._grow(*pair) for pair in zip(rows, self._rows, strict=True)], self.device)

    def _grow(self, row: DraftRow, index: Index) -> _Nodes:
        """The tree of one row: nodes in the order of their score, ties by depth, then rank, then parent."""
        nodes = _Nodes(row.tokens[-1])
        contexts = [row.tokens[-self.order :]]
        foresight = None
        if row.noise is not None and self.coupling != PLAIN:
            foresight = _Foresight(row.noise, self.coupling)
        # Each entry stands for a node's children from some rank on: (cost of the first, depth, rank, node, children).
        waiting: list[tuple[float, int, int, int, Candidates]] = []

        def wait(node: int, rank: int, children: Candidates) -> None:
            if rank < len(children):
                cost = -math.log(children[rank][1]) - nodes.logprobs[node]
                heapq.heappush(waiting, (cost, nodes.depths[node] + 1, rank, node, children))

        node = 0
        while node < row.budget:
            if nodes.depths[node] < row.depth:
                position = len(row.tokens) + nodes.depths[node]
                wait(node, 0, self._children(contexts[node], index, position, foresight))
            if not waiting or waiting[0][0] > -row.floor:
                break
            cost, depth, rank, parent, children = heapq.heappop(waiting)
            token, _ = children[rank]
            if not row.chain:
                wait(parent, rank + 1, children)
            node = nodes.append(token, parent, depth, -cost)
            contexts.append([*contexts[parent], token][-self.order :])
        return nodes

    def _children(
        self, context: list[int], index: Index, position: int, foresight: _Foresight | None
    ) -> Candidates:
        """Known tokens at a position with their probabilities, best first; ties by longest suffix, then newest."""
        scores, unknown = successors(context, index, self.table, self.weight)
        if scores and foresight:
            return foresight.rank(scores, unknown, position)
        return sorted(scores.items(), key=itemgetter(1), reverse=True)


class _Foresight:
    """Candidates ranked under a row's noise, as `ddtree.noise.couple` ranks a whole vocabulary.

    The unknown tokens compete as one, with the mean of the noise. What is drawn at a position serves all nodes there.
    """

    def __init__(self, noise: Noise, coupling: tuple[float, float]) -> None:
        self._noise = noise
        self._beta, self._kappa = coupling
        self._drawn: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def rank(self, scores: dict[int, float], unknown: float, position: int) -> Candidates:
        drawn = self._drawn[position]
        missing = [token for token in scores if token not in drawn]
        if missing:
            drawn.update(zip(missing, self._noise.few(position, missing), strict=True))
        beta, kappa = self._beta, self._kappa
        values = [(math.log(score) + beta * drawn[token]) / kappa for token, score in scores.items()]
        rest = (math.log(unknown) + beta * _MEAN_GUMBEL) / kappa
        highest = max(rest, *values)
        chances = [math.exp(value - highest) for value in values]
        total = sum(chances) + math.exp(rest - highest)
        ranked = sorted(zip(scores, chances, strict=True), key=itemgetter(1), reverse=True)
        return [(token, chance / total) for token, chance in ranked if chance > 0]


class _Nodes:
    """The columns of one row's tree."""

    def __init__(self, bonus: int) -> None:
        self.tokens, self.parents, self.depths, self.logprobs = [bonus], [0], [0], [0.0]

    def append(self, token: int, parent: int, depth: int, score: float) -> int:
        """Add a node and return its place."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.logprobs.append(score)
        return len(self.tokens) - 1


def _stacked(trees: list[_Nodes], device: torch.device) -> DraftTree:
    sizes = [len(nodes.tokens) for nodes in trees]
    width = max(sizes)

    def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        lists = [getattr(nodes, name) for nodes in trees]
        return torch.tensor([own + [fill] * (width - len(own)) for own in lists], dtype=dtype, device=device)

    return DraftTree(
        column("tokens", 0, torch.int64),
        column("parents", 0, torch.int64),
        column("depths", 0, torch.int64),
        column("logprobs", -math.inf, torch.float32),
        sizes,
    )
