"""N-grams and a network as one drafter: each node's children have a mix of both's probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from ddtree.drafters import Drafter, DraftRow
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.lazy_tree import Children, LazyTree, PathModel, batched, grow_lazily
from ddtree.drafters.merged import Merged, within_reach
from ddtree.drafters.ngram import Lookup, NgramProposals, NgramState
from ddtree.errors import ConfigError
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, DraftTree

_LEAST = 32  # candidates a depth that a network's marginals are asked for at the least
_ROOM = 2  # nodes of another drafter's tree for each that is wanted: the mix ranks them anew


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
        return [
            (part.name, tree) for part, tree in zip(self.drafters, made, strict=True) if max(tree.sizes) > 1
        ]

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row; where no row may use both parts, as `Merged` does."""
        self._drafted = None
        if not any(row.names(self.network) and row.names(self.lookup) for row in rows):
            return super().draft(rows, clock)
        networks = self._network_proposals(rows, clock)
        self._drafted = [(row, len(row.tokens), network) for row, network in zip(rows, networks, strict=True)]
        self.lookup.follow(rows)
        with clock("build"):
            trees = [
                _grown(row, self._model(networks[index], self._ngrams(index, row)))
                for index, row in enumerate(rows)
            ]
            return batched(trees, self.lookup.device)

    def _model(self, network: _NetworkProposals | None, ngrams: NgramProposals | None) -> PathModel | None:
        """Return the mix of both parts, or the only one that drafts for a row."""
        if network is None or ngrams is None:
            return network or ngrams
        return _Mix(network, ngrams, self.weight)

    def _ngrams(self, index: int, row: DraftRow) -> NgramProposals | None:
        """Return the n-grams' part in a row's tree; None when the row names the network alone."""
        return self.lookup.proposals_for(index, row) if row.names(self.lookup) else None

    def _network_proposals(self, rows: list[DraftRow], clock: Clock) -> list[_NetworkProposals | None]:
        """Return the network's part in each row's tree; None for a row that it does not draft for."""
        network = self.network
        asked = [within_reach(row, network) for row in rows]
        if isinstance(network, DFlash):
            width = max((max(row.budget, _LEAST) for row in asked if row.depth and row.budget), default=0)
            if not width:
                return [None] * len(rows)
            tokens, logprobs = network.candidates(asked, width)
            with clock("build"):
                columns = zip(tokens.tolist(), logprobs.exp().tolist(), asked, strict=True)
                return [
                    _MarginalProposals(known, chances, row.depth, max(row.budget, _LEAST))
                    if row.depth
                    else None
                    for known, chances, row in columns
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


class _Candidates(NamedTuple):
    """A network's candidates for one place, best first, and the same by token."""

    ranked: list[tuple[int, float]]
    known: dict[int, float]


_NOTHING = _Candidates([], {})


class _MarginalProposals:
    """Candidates that depend on the depth alone; a `PathModel` whose state is the depth of a path."""

    def __init__(self, tokens: list[list[int]], chances: list[list[float]], depth: int, width: int) -> None:
        self._levels = list(zip(tokens[:depth], chances[:depth], strict=True))
        self._width = width
        self._made: dict[int, _Candidates] = {}

    def start(self) -> int:
        return 0

    def step(self, state: int, token: int) -> int:
        return state + 1

    def candidates(self, state: int) -> _Candidates:
        """Return the likeliest tokens at the depth below; none beyond the network's depth."""
        if state >= len(self._levels):
            return _NOTHING
        if state not in self._made:
            pairs = zip(*self._levels[state], strict=True)
            ranked = [pair for pair in islice(pairs, self._width) if pair[1] > 0]
            self._made[state] = _Candidates(ranked, dict(ranked))
        return self._made[state]

    def children(self, state: int) -> Children:
        return iter(self.candidates(state).ranked)


class _TreeProposals:
    """Candidates out of a drafter's own tree; a `PathModel` whose state is a node of it, -1 outside of it."""

    def __init__(self, tree: DraftTree, row: int) -> None:
        size = tree.sizes[row]
        tokens, parents, scores = (
            column[row, :size].tolist() for column in (tree.tokens, tree.parents, tree.logprobs)
        )
        self._candidates = [_Candidates([], {}) for _ in range(size)]
        self._nodes: dict[tuple[int, int], int] = {}
        for node in range(1, size):
            parent, token = parents[node], tokens[node]
            chance = math.exp(scores[node] - scores[parent])
            if chance > 0:
                self._nodes[parent, token] = node
                self._candidates[parent].ranked.append((token, chance))
                self._candidates[parent].known[token] = chance

    def start(self) -> int:
        return 0

    def step(self, state: int, token: int) -> int:
        return self._nodes.get((state, token), -1)

    def candidates(self, state: int) -> _Candidates:
        """Return the children of a node."""
        return self._candidates[state] if state >= 0 else _NOTHING

    def children(self, state: int) -> Children:
        return iter(self.candidates(state).ranked)


_NetworkProposals = _MarginalProposals | _TreeProposals


class _Mix:
    """The mix of a network's and n-grams' probabilities; a `PathModel` whose state is both their states."""

    def __init__(self, network: _NetworkProposals, ngrams: NgramProposals, weight: float) -> None:
        self._network, self._ngrams, self._weight = network, ngrams, weight

    def start(self) -> tuple[int, NgramState]:
        return self._network.start(), self._ngrams.start()

    def step(self, state: tuple[int, NgramState], token: int) -> tuple[int, NgramState]:
        return self._network.step(state[0], token), self._ngrams.step(state[1], token)

    def children(self, state: tuple[int, NgramState]) -> Children:
        ranked, known = self._network.candidates(state[0])
        seen = self._ngrams.probabilities(state[1])
        if not seen:
            return iter(ranked)
        rest = 1 - self._weight * sum(seen.values())
        mixed = [
            (token, self._weight * chance + rest * known.get(token, 0.0)) for token, chance in seen.items()
        ]
        mixed.sort(key=itemgetter(1), reverse=True)
        return _interleaved(mixed, ranked, rest, seen)


def _interleaved(
    mixed: list[tuple[int, float]], ranked: list[tuple[int, float]], rest: float, seen: dict[int, float]
) -> Children:
    """Yield `mixed` and, times `rest`, those of `ranked` that are not in it, best first."""
    place = 0
    for token, chance in ranked if rest > 0 else ():
        if token in seen:
            continue
        chance *= rest
        while place < len(mixed) and mixed[place][1] >= chance:
            yield mixed[place]
            place += 1
        yield token, chance
    yield from mixed[place:]
