"""Several drafters with one tree under one budget: their trees merged, or their probabilities mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter

from torch import Tensor

from ddtree.drafters import Drafter, DraftRow
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.ngram import (
    Children,
    LazyTree,
    Lookup,
    NgramProposals,
    NgramState,
    PathModel,
    batched,
    grow_lazily,
)
from ddtree.errors import ConfigError
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, DraftTree, merge

_LEAST = 32  # candidates a depth that a network's marginals are asked for at the least
_ROOM = 2  # nodes of another drafter's tree for each that is wanted: the mix ranks them anew


class Merged:
    """The union of several drafters' trees, cut to each row's budget by score; see `ddtree.tree.merge`.

    Every drafter drafts with the whole budget, since any of them may turn out to hold the best nodes. A row that
    wants a chain gets the one with the most expected accepted tokens.

    Args:
        drafters: at least one, not yet in use; of equal scores the earlier one's come first.

    Raises:
        ConfigError: there is no drafter, or one is named twice.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ConfigError("drafters=[] holds no drafter to merge: give at least one")
        if len({id(drafter) for drafter in drafters}) < len(drafters):
            raise ConfigError("a drafter is given twice: each keeps its own state of every row")
        self.drafters = list(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        layers = [layer for drafter in drafters for layer in drafter.feature_layers]
        self.feature_layers = tuple(sorted(set(layers)))
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        self._proposals: list[tuple[str, DraftTree]] = []

    @property
    def proposals(self) -> list[tuple[str, DraftTree]]:
        """Name and own tree of each drafter that drafted last."""
        return self._proposals

    def add_row(self) -> None:
        """Open an empty row at the end of every drafter."""
        for drafter in self.drafters:
            drafter.add_row()

    def drop_row(self, row: int) -> None:
        """Forget a row in every drafter; the last row takes its index."""
        for drafter in self.drafters:
            drafter.drop_row(row)

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Pass newly committed tokens on, to each drafter with the features of its own layers."""
        for drafter in self.drafters:
            drafter.observe(row, tokens, self._features_for(drafter, features))

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row."""
        trees = [
            drafter.draft([within_reach(row, drafter) for row in rows], clock) for drafter in self.drafters
        ]
        drafted = [index for index, tree in enumerate(trees) if max(tree.sizes) > 1]
        self._proposals = [(self.drafters[index].name, trees[index]) for index in drafted]
        trees = [trees[index] for index in drafted] or trees[:1]
        budgets = [row.budget for row in rows]
        with clock("build"):
            if len(trees) == 1:
                return trees[0].truncate(budgets)
            if any(row.chain for row in rows):
                trees = _one_chain(rows, trees)
            return merge(trees, budgets)

    def _features_for(self, drafter: Drafter, features: Tensor | None) -> Tensor | None:
        """Return the columns of a drafter's own layers, in its order, out of those of all layers [n, F * H]."""
        if features is None or not drafter.feature_layers:
            return None
        if drafter.feature_layers == self.feature_layers:
            return features
        places = [self.feature_layers.index(layer) for layer in drafter.feature_layers]
        return features.unflatten(1, (len(self.feature_layers), -1))[:, places].flatten(1)


def within_reach(row: DraftRow, drafter: Drafter) -> DraftRow:
    """Return the row with the depth that one of several drafters can draft: 0 when the row names others."""
    return replace(row, depth=min(row.depth, drafter.max_depth) if row.names(drafter) else 0)


def _one_chain(rows: list[DraftRow], trees: list[DraftTree]) -> list[DraftTree]:
    """Return the trees with all but the best chain of a row that wants one cut back to their roots."""
    expected = [tree.logprobs.exp().sum(dim=1).tolist() for tree in trees]
    best = [max(range(len(trees)), key=lambda place: expected[place][index]) for index in range(len(rows))]
    budgets = [
        [0 if row.chain and best[index] != place else tree.sizes[index] - 1 for index, row in enumerate(rows)]
        for place, tree in enumerate(trees)
    ]
    return [tree.truncate(own) for tree, own in zip(trees, budgets, strict=True)]


class Mixed(Merged):
    """Several drafters' parts, as `Merged`, but their probabilities mixed and not their trees.

    A block drafter's marginals do not know which tokens a branch chose; n-grams do, and so the mix makes them depend
    on the path at no cost (a continuity prior: DART, arXiv 2601.19278). A child has the probability

        w s + (1 - w e) q

    where s is the n-grams' probability of it, e the sum of s over all tokens they know there, which is how much they
    have seen, and q the network's. Scores stay probabilities: those of siblings sum to at most 1.

    The tree is the best one under the mix when the network is a `DFlash`, of which the likeliest tokens of a depth are
    looked at: as many as there are nodes, and 32 at least. Another drafter's q is taken from its own tree: where a
    path has left it, the n-grams go on alone.

    Args:
        network: the drafter whose probabilities are mixed in; rows may name it alone as a member.
        lookup: the n-grams; rows may name them alone.
        weight: w, 0 < w <= 1, how far the n-grams are trusted.

    Raises:
        ConfigError: the weight is out of range.
    """

    def __init__(self, network: Drafter, lookup: Lookup, *, weight: float = 0.75) -> None:
        super().__init__([network, lookup])
        if not 0 < weight <= 1:
            raise ConfigError(f"weight={weight} is not above 0 and at most 1: it is the n-grams' share")
        self.network = network
        self.lookup = lookup
        self.weight = weight
        self._drafted: list[tuple[DraftRow, int, _NetworkProposals | None]] | None = None

    @property
    def proposals(self) -> list[tuple[str, DraftTree]]:
        """Name and own tree of each drafter that drafted last; after a mix they are made when they are asked for."""
        if self._drafted is None:
            return super().proposals
        networks, ngrams = [], []
        for index, (asked, length, network) in enumerate(self._drafted):
            # The row's text may have grown since the draft.
            row = replace(asked, tokens=asked.tokens[:length])
            networks.append(_grown(row, network))
            ngrams.append(_grown(row, self._ngrams(index, row)))
        made = [batched(trees, self.lookup.device) for trees in (networks, ngrams)]
        named = [(part.name, tree) for part, tree in zip(self.drafters, made, strict=True)]
        return [(name, tree) for name, tree in named if max(tree.sizes) > 1]

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row; where no row may use both parts, as `Merged` does."""
        self._drafted = None
        if not any(row.names(self.network) and row.names(self.lookup) for row in rows):
            return super().draft(rows, clock)
        networks = self._network_proposals(rows, clock)
        self._drafted = [(row, len(row.tokens), network) for row, network in zip(rows, networks, strict=True)]
        self.lookup.follow(rows)
        with clock("build"):
            trees = []
            for index, (row, network) in enumerate(zip(rows, networks, strict=True)):
                ngrams = self._ngrams(index, row)
                both = _Mix(network, ngrams, self.weight) if network and ngrams else None
                trees.append(_grown(row, both or network or ngrams))
            return batched(trees, self.lookup.device)

    def _ngrams(self, index: int, row: DraftRow) -> NgramProposals | None:
        """Return the n-grams' part in a row's tree; None when the row names the network alone."""
        return self.lookup.proposals_for(index, row) if row.names(self.lookup) else None

    def _network_proposals(self, rows: list[DraftRow], clock: Clock) -> list[_NetworkProposals | None]:
        """Return the network's part in each row's tree; None for a row that it does not draft for."""
        network = self.network
        asked = [within_reach(row, network) for row in rows]
        if isinstance(network, DFlash):
            widths = [max(row.budget, _LEAST) if row.depth else 0 for row in asked]
            if not any(row.depth and row.budget for row in asked):
                return [None] * len(rows)
            tokens, logprobs = network.candidates(asked, max(widths))
            with clock("build"):
                columns = zip(tokens.tolist(), logprobs.exp().tolist(), asked, widths, strict=True)
                return [
                    _MarginalProposals(known[: row.depth], chances[: row.depth], width) if row.depth else None
                    for known, chances, row, width in columns
                ]
        more = [
            replace(row, budget=min(_ROOM * row.budget, MAX_BUDGET) if row.names(network) else 0)
            for row in asked
        ]
        tree = network.draft(more, clock)
        with clock("build"):
            return [_TreeProposals(tree, index) if row.depth else None for index, row in enumerate(asked)]


def _grown(row: DraftRow, model: PathModel | None) -> LazyTree:
    return LazyTree(row.tokens[-1]) if model is None else grow_lazily(row, model)


class _NetworkProposals:
    """A network's part in a row's tree; a `PathModel` whose state is a number, 0 for the root."""

    def start(self) -> int:
        return 0

    def step(self, state: int, token: int) -> int:
        raise NotImplementedError

    def candidates(self, state: int) -> dict[int, float]:
        """Return the probabilities of the known children of a path, best first."""
        raise NotImplementedError

    def children(self, state: int) -> Children:
        return iter(self.candidates(state).items())


class _MarginalProposals(_NetworkProposals):
    """Candidates that depend on the depth alone, which is the state of a path."""

    def __init__(self, tokens: list[list[int]], chances: list[list[float]], width: int) -> None:
        self._levels = list(zip(tokens, chances, strict=True))
        self._width = width
        self._made: dict[int, dict[int, float]] = {}

    def step(self, state: int, token: int) -> int:
        return state + 1

    def candidates(self, state: int) -> dict[int, float]:
        """Return the likeliest tokens at the depth below; none beyond the network's depth."""
        if state >= len(self._levels):
            return {}
        if state not in self._made:
            pairs = islice(zip(*self._levels[state], strict=True), self._width)
            self._made[state] = {token: chance for token, chance in pairs if chance > 0}
        return self._made[state]


class _TreeProposals(_NetworkProposals):
    """Candidates out of a drafter's own tree; the state is a node of it, -1 outside of it."""

    def __init__(self, tree: DraftTree, row: int) -> None:
        size = tree.sizes[row]
        tokens, parents, scores = (
            column[row, :size].tolist() for column in (tree.tokens, tree.parents, tree.logprobs)
        )
        self._candidates: list[dict[int, float]] = [{} for _ in range(size)]
        self._nodes: dict[tuple[int, int], int] = {}
        for node in range(1, size):
            parent, token = parents[node], tokens[node]
            chance = math.exp(scores[node] - scores[parent])
            if chance > 0:
                self._nodes[parent, token] = node
                self._candidates[parent][token] = chance

    def step(self, state: int, token: int) -> int:
        return self._nodes.get((state, token), -1)

    def candidates(self, state: int) -> dict[int, float]:
        """Return the children of a node."""
        return self._candidates[state] if state >= 0 else {}


class _Mix:
    """The mix of a network's and n-grams' probabilities; a `PathModel` whose state is both their states."""

    def __init__(self, network: _NetworkProposals, ngrams: NgramProposals, weight: float) -> None:
        self._network, self._ngrams, self._weight = network, ngrams, weight

    def start(self) -> tuple[int, NgramState]:
        return self._network.start(), self._ngrams.start()

    def step(self, state: tuple[int, NgramState], token: int) -> tuple[int, NgramState]:
        return self._network.step(state[0], token), self._ngrams.step(state[1], token)

    def children(self, state: tuple[int, NgramState]) -> Children:
        known, seen = self._network.candidates(state[0]), self._ngrams.probabilities(state[1])
        if not seen:
            return iter(known.items())
        rest = 1 - self._weight * sum(seen.values())
        mixed = [(token, self._weight * own + rest * known.get(token, 0.0)) for token, own in seen.items()]
        mixed.sort(key=itemgetter(1), reverse=True)
        return _interleaved(mixed, known if rest > 0 else {}, rest, seen)


def _interleaved(
    mixed: list[tuple[int, float]], known: dict[int, float], rest: float, seen: dict[int, float]
) -> Children:
    """Yield `mixed` and, times `rest`, those of `known` that are not in it, best first."""
    place = 0
    for token, chance in known.items():
        if token in seen:
            continue
        chance *= rest
        while place < len(mixed) and mixed[place][1] >= chance:
            yield mixed[place]
            place += 1
        yield token, chance
    yield from mixed[place:]
