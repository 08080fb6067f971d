"""Prompt lookup: what followed the same tokens before, in the row's own text or in a static table. No model."""

from __future__ import annotations

import math
from collections import defaultdict
from operator import itemgetter

import torch
from torch import Tensor

from ddtree.drafters import DraftRow
from ddtree.drafters.lazy_tree import Children, Nodes, grow_on_demand, stacked
from ddtree.drafters.ngram_table import MAX_ORDER, Index, NgramTable, successors
from ddtree.errors import CheckpointError, ConfigError
from ddtree.model.kv_cache import drop_row
from ddtree.sampling.noise import PLAIN, Noise, check_coupling
from ddtree.stats import Clock
from ddtree.tree import MAX_DEPTH, DraftTree

_MEAN_GUMBEL = 0.5772
_WEIGHT, _WEIGHT_ALONE = 6.0, 2.0


class Lookup:
    """Drafts with n-grams, best first under each row's budget; the probabilities are `ddtree.drafters.backoff`'s.

    Args:
        table: counts of other texts, such as the target's own answers; None uses the row's text alone.
        vocab_size: the target's; a table with higher ids is refused.
        order: longest context, 1..8.
        weight: how much one sight in the row's own text counts: against one in the table, by default 6; without a
            table against the doubt whether it comes again, by default 2, where held-out answers are likeliest.
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
        weight: float | None = None,
        coupling: tuple[float, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= order <= MAX_ORDER:
            raise ConfigError(f"order={order} is outside 1..{MAX_ORDER}: give a whole number in that range")
        if weight is None:
            weight = _WEIGHT_ALONE if table is None else _WEIGHT
        if not 0 < weight < math.inf:
            raise ConfigError(f"weight={weight} is not a positive finite number")
        if table is not None and vocab_size is not None and table.vocab_size > vocab_size:
            raise CheckpointError(
                f"the n-gram table holds token id {table.vocab_size - 1} and the target has {vocab_size} tokens: "
                "build a table from the target's own answers"
            )
        if coupling is None:
            coupling = PLAIN if table is None else table.coupling
        check_coupling(*coupling)
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
        self.follow(rows)
        with clock("build"):
            trees = [grow_on_demand(row, self.guess(index, row).children) for index, row in enumerate(rows)]
            return stacked(trees, self.device)

    def follow(self, rows: list[DraftRow]) -> None:
        """Take in what the rows' texts have beyond what was seen of them."""
        for index, row in enumerate(rows):
            if not self._rows[index].follows(row.tokens):
                self._rows[index] = Index(self.order)
            self._rows[index].extend(row.tokens)

    def guess(self, index: int, row: DraftRow) -> Guess:
        """What may follow the prefixes of a row that was last followed."""
        foresight = None
        if row.noise is not None and self.coupling != PLAIN:
            foresight = _Foresight(row.noise, self.coupling)
        return Guess(self._rows[index], self.table, self.weight, row.tokens, foresight)


class Guess:
    """Probabilities of the tokens that n-grams know to follow the nodes of one row's tree, as it grows.

    Args:
        index: n-grams of the row's text.
        table: of other texts.
        weight: of a sight in the row's text, against one in the table.
        tokens: the row's text, the bonus token included.
        foresight: of the row's noise, for a sampled row.
    """

    def __init__(
        self,
        index: Index,
        table: NgramTable | None,
        weight: float,
        tokens: list[int],
        foresight: _Foresight | None,
    ) -> None:
        self._known = index, table, weight
        self._order = index.order
        self._contexts = [tokens[-self._order :]]
        self._end = len(tokens)
        self._foresight = foresight

    def scores(self, nodes: Nodes, node: int) -> dict[int, float]:
        """Of the known children of a node; what they lack to 1 is left to unknown tokens. Ask node by node."""
        for place in range(len(self._contexts), node + 1):
            before = self._contexts[nodes.parents[place]]
            self._contexts.append([*before, nodes.tokens[place]][-self._order :])
        scores, unknown = successors(self._contexts[node], *self._known)
        if scores and self._foresight:
            return self._foresight.chances(scores, unknown, self._end + nodes.depths[node])
        return scores

    def children(self, nodes: Nodes, node: int) -> Children:
        """The known ones, best first; ties by longest suffix, then newest."""
        return iter(sorted(self.scores(nodes, node).items(), key=itemgetter(1), reverse=True))


class _Foresight:
    """Candidates ranked under a row's noise, as `ddtree.noise.couple` ranks a whole vocabulary.

    The unknown tokens compete as one, with the mean of the noise. What is drawn at a position serves all nodes there.
    """

    def __init__(self, noise: Noise, coupling: tuple[float, float]) -> None:
        self._noise = noise
        self._beta, self._kappa = coupling
        self._drawn: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def chances(self, scores: dict[int, float], unknown: float, position: int) -> dict[int, float]:
        """The scores under the noise of a position; those of no chance are left out."""
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
        return {token: chance / total for token, chance in zip(scores, chances, strict=True) if chance > 0}
