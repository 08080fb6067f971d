"""One tree of several drafters' proposals."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.tree.draft_tree import MAX_BUDGET, DraftTree, check_each


def merge(trees: list[DraftTree], budgets: list[int]) -> DraftTree:
    """The union of the trees' prefixes, cut to the best of each row.

    A prefix that several trees hold scores as in the tree that thinks most of it; a parent then still scores no
    less than its children, and no two siblings carry the same token. Ties go by depth, then to the earlier tree.

    Args:
        trees: trees over the same rows, with the same bonus tokens.
        budgets: most nodes besides the root, 0..1024, for each row.

    Raises:
        ConfigError: there are no trees, their roots differ, or a budget is outside its range.
    """
    if not trees:
        raise ConfigError("trees=[] holds no tree to merge: give at least one")
    roots = trees[0].tokens[:, 0].tolist()
    for tree in trees[1:]:
        if tree.tokens[:, 0].tolist() != roots:
            raise ConfigError(
                "the trees to merge have different roots: give trees drafted from the same rows"
            )
    check_each("budgets", budgets, len(roots), 0, MAX_BUDGET)
    rows = [_union([tree.row(row) for tree in trees], budget) for row, budget in enumerate(budgets)]
    return DraftTree.stack(rows)


def _union(trees: list[DraftTree], budget: int) -> DraftTree:
    """The best prefixes of trees of one row each."""
    tokens, parents, depths, scores = trees[0].tokens[0, :1].tolist(), [0], [0], [0.0]
    seen: dict[tuple[int, int], int] = {}
    for tree in trees:
        # Where each node of this tree stands in the union.
        own = [0]
        columns = (tree.tokens, tree.parents, tree.depths, tree.logprobs)
        for token, parent, depth, score in list(zip(*(c[0].tolist() for c in columns), strict=True))[1:]:
            key = (own[parent], token)
            place = seen.setdefault(key, len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(key[0])
                depths.append(depth)
                scores.append(score)
            elif score > scores[place]:
                scores[place] = score
            own.append(place)
    order = [0, *sorted(range(1, len(tokens)), key=lambda node: (-scores[node], depths[node]))[:budget]]
    places = {node: place for place, node in enumerate(order)}
    device = trees[0].tokens.device

    def column(values: list[int] | list[float]) -> Tensor:
        return torch.tensor([values], device=device)

    return DraftTree(
        column([tokens[node] for node in order]),
        column([places[parents[node]] for node in order]),
        column([depths[node] for node in order]),
        column([scores[node] for node in order]),
        [len(order)],
    )
