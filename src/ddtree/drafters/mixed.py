"""N-grams and a network as one drafter: each node's children have a mix of both's probabilities."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from ddtree.drafters import Drafter, DraftRow
from ddtree.drafters.dflash.drafter import DFlash
from ddtree.drafters.lazy_tree import Children, Nodes, grow_on_demand, stacked
from ddtree.drafters.merged import Merged
from ddtree.drafters.ngram import Guess, Lookup
from ddtree.errors import ConfigError
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, DraftTree

_LEAST = 32  # candidates a depth that a network's marginals are asked for at the least
_ROOM = 2  # nodes of another drafter's tree for each that is wanted: the mix ranks them anew


class Continuity(Merged):
    """Several drafters' parts, as `Merged`, but their probabilities mixed and not their trees.

    A block drafter's marginals do not know which tokens a branch chose; n-grams do, and so the mix makes them depend
    on the path at no cost (a continuity prior: DART, arXiv 2601.19278). A child has the probability

        w s + (1 - w e) q

    where s is the n-grams' probability of it, e the sum of s over all tokens they know there, which is how much they
    have seen, and q the network's. Scores stay probabilities: those of siblings sum to at most 1.

    The tree is the best one under the mix when the network is a `DFlash`, of which the likeliest tokens of a depth are
    looked at: as many as there are nodes, and 32 at least. Another drafter's q is taken from its own
    tree: where a path has left it, the n-grams go on alone.

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
        self._asked: list[tuple[DraftRow, int, _Guide | None]] | None = None

    @property
    def proposals(self) -> list[tuple[str, DraftTree]]:
        """Name and own tree of each drafter that drafted last; after a mix they are made when they are asked for."""
        if self._asked is None:
            return super().proposals
        trees: tuple[list[Nodes], list[Nodes]] = ([], [])
        for index, (asked, length, guide) in enumerate(self._asked):
            # The row's text has gone on growing.
            row = replace(asked, tokens=asked.tokens[:length])
            guess = self.lookup.guess(index, row) if _drafts(row, self.lookup) else None
            own = None if guide is None else guide.afresh()
            for place, mix in enumerate((_Mix(own, None, 1.0), _Mix(None, guess, 1.0))):
                trees[place].append(grow_on_demand(row, mix.children))
        made = [stacked(own, self.lookup.device) for own in trees]
        return [
            (part.name, tree) for part, tree in zip(self.drafters, made, strict=True) if max(tree.sizes) > 1
        ]

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        both = [
            all(row.members is None or part.name in row.members for part in self.drafters) for row in rows
        ]
        self._asked = None
        if not any(both):
            return super().draft(rows, clock)
        guides = self._guides(rows, clock)
        self._asked = [(row, len(row.tokens), guide) for row, guide in zip(rows, guides, strict=True)]
        self.lookup.follow(rows)
        with clock("build"):
            trees = []
            for index, row in enumerate(rows):
                guess = self.lookup.guess(index, row) if _drafts(row, self.lookup) else None
                trees.append(grow_on_demand(row, _Mix(guides[index], guess, self.weight).children))
            return stacked(trees, self.lookup.device)

    def _guides(self, rows: list[DraftRow], clock: Clock) -> list[_Guide | None]:
        """What the network says of each row; None for a row that it does not draft for."""
        network = self.network
        asked = [_asked_of(network, row) for row in rows]
        if isinstance(network, DFlash):
            width = max((max(row.budget, _LEAST) for row in asked if row.depth and row.budget), default=0)
            if not width:
                return [None] * len(rows)
            tokens, logprobs = network.candidates(asked, width)
            with clock("build"):
                columns = zip(tokens.tolist(), logprobs.exp().tolist(), asked, strict=True)
                return [
                    _Marginals(known, chances, row.depth, max(row.budget, _LEAST)) if row.depth else None
                    for known, chances, row in columns
                ]
        more = [replace(row, budget=min(_ROOM * row.budget, MAX_BUDGET)) for row in asked]
        tree = network.draft(more, clock)
        with clock("build"):
            return [_Tree(tree, index) if row.depth else None for index, row in enumerate(asked)]


class _Likely(NamedTuple):
    """A network's candidates for one place, best first, and the same by token."""

    ranked: list[tuple[int, float]]
    known: dict[int, float]


_NOTHING = _Likely([], {})


class _Marginals:
    """Candidates that depend on the depth alone."""

    def __init__(self, tokens: list[list[int]], chances: list[list[float]], depth: int, width: int) -> None:
        self._levels = list(zip(tokens[:depth], chances[:depth], strict=True))
        self._width = width
        self._made: dict[int, _Likely] = {}

    def likely(self, nodes: Nodes, node: int) -> _Likely:
        depth = nodes.depths[node]
        if depth >= len(self._levels):
            return _NOTHING
        if depth not in self._made:
            pairs = zip(*self._levels[depth], strict=True)
            ranked = [pair for pair in islice(pairs, self._width) if pair[1] > 0]
            self._made[depth] = _Likely(ranked, dict(ranked))
        return self._made[depth]

    def afresh(self) -> _Marginals:
        """For another tree."""
        return self


class _Tree:
    """Candidates out of a drafter's own tree."""

    def __init__(self, tree: DraftTree, row: int) -> None:
        size = tree.sizes[row]
        tokens, parents, scores = (
            column[row, :size].tolist() for column in (tree.tokens, tree.parents, tree.logprobs)
        )
        self._likely = [_Likely([], {}) for _ in range(size)]
        self._places: dict[tuple[int, int], int] = {}
        for node in range(1, size):
            parent, token = parents[node], tokens[node]
            chance = math.exp(scores[node] - scores[parent])
            if chance > 0:
                self._places[parent, token] = node
                self._likely[parent].ranked.append((token, chance))
                self._likely[parent].known[token] = chance
        # Where each node of the growing tree stands in this one; -1 outside of it.
        self._at = [0]

    def likely(self, nodes: Nodes, node: int) -> _Likely:
        for place in range(len(self._at), node + 1):
            self._at.append(self._places.get((self._at[nodes.parents[place]], nodes.tokens[place]), -1))
        return self._likely[self._at[node]] if self._at[node] >= 0 else _NOTHING

    def afresh(self) -> _Tree:
        """For another tree."""
        other = copy(self)
        other._at = [0]
        return other


_Guide = _Marginals | _Tree


class _Mix:
    """Children of the nodes of one row's tree."""

    def __init__(self, guide: _Guide | None, guess: Guess | None, weight: float) -> None:
        self._guide, self._guess, self._weight = guide, guess, weight

    def children(self, nodes: Nodes, node: int) -> Children | None:
        if self._guide is None:
            return self._guess.children(nodes, node) if self._guess else None
        ranked, known = self._guide.likely(nodes, node)
        seen = self._guess.scores(nodes, node) if self._guess else {}
        if not seen:
            return iter(ranked)
        weight = self._weight
        rest = 1 - weight * sum(seen.values())
        mixed = [(token, weight * score + rest * known.get(token, 0.0)) for token, score in seen.items()]
        mixed.sort(key=_chance, reverse=True)
        return _interleaved(mixed, ranked, rest, seen)


def _interleaved(
    mixed: list[tuple[int, float]], ranked: list[tuple[int, float]], rest: float, seen: dict[int, float]
) -> Children:
    """`mixed` and, times `rest`, those of `ranked` that are not in it, best first."""
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


def _chance(pair: tuple[int, float]) -> float:
    return pair[1]


def _asked_of(network: Drafter, row: DraftRow) -> DraftRow:
    if not _drafts(row, network):
        return replace(row, depth=0, budget=0)
    return row if row.depth <= network.max_depth else replace(row, depth=network.max_depth)


def _drafts(row: DraftRow, part: Drafter) -> bool:
    return row.members is None or part.name in row.members
