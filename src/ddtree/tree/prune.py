"""Keep the best nodes of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.tree.costs import ABSENT, cheapest, costs_of
from ddtree.tree.draft_tree import MAX_BUDGET, MAX_DEPTH, DraftTree, check_each, in_use


@torch.no_grad()
def prune(
    tree: DraftTree, budgets: list[int], beta: float = 0.0, depths: list[int] | None = None
) -> DraftTree:
    """The best nodes of each row by log-probability + beta * depth, in that order; ties keep the order they had.

    A child never scores above its parent, so the result is prefix-closed. Deferred pruning with a depth penalty
    is DARTree's (arXiv 2608.13524); with beta = 0, a tree that holds the optimum becomes the best-first tree.

    Args:
        budgets: most nodes besides the root, 0..1024, for each row.
        beta: added once a level; at most 0. Useful values are -0.2 to 0.
        depths: deepest level to keep, 0..16, for each row; all levels by default.

    Raises:
        ConfigError: a value is outside its range.
    """
    rows, nodes = tree.tokens.shape
    check_each("budgets", budgets, rows, 0, MAX_BUDGET)
    if not beta <= 0 or beta == float("-inf"):
        raise ConfigError(
            f"beta={beta!r} is not a finite number of at most 0: it is a penalty for each level"
        )
    costs = costs_of(tree.logprobs + beta * tree.depths if beta else tree.logprobs)
    sizes = tree.sizes
    if min(sizes) < nodes:
        costs = costs.masked_fill(~in_use(tree), ABSENT)
    if depths is not None:
        check_each("depths", depths, rows, 0, MAX_DEPTH)
        costs = costs.masked_fill(tree.depths > torch.tensor(depths, device=costs.device)[:, None], ABSENT)
        sizes = (costs < ABSENT).sum(1).tolist()
    sizes = [min(size, budget + 1) for size, budget in zip(sizes, budgets, strict=True)]
    return reorder(tree, cheapest(costs, max(sizes)), sizes)


def reorder(tree: DraftTree, order: Tensor, sizes: list[int]) -> DraftTree:
    """The nodes `order` [R, n] of a tree, as a tree of these sizes; a node's parent must stand before it."""
    places = torch.zeros_like(tree.parents)
    new = torch.arange(order.shape[1], device=order.device).expand_as(order)
    places.scatter_(1, order, new)
    picked = DraftTree(
        tree.tokens.gather(1, order),
        places.gather(1, tree.parents.gather(1, order)),
        tree.depths.gather(1, order),
        tree.logprobs.gather(1, order),
        sizes,
    )
    return picked if min(sizes) == order.shape[1] else picked.padded()
