"""Several drafters with one tree under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ddtree.drafters import Drafter, DraftRow
from ddtree.errors import ConfigError
from ddtree.stats import Clock
from ddtree.tree import DraftTree, merge


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
