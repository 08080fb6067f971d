"""Build, prune, merge, mask and walk draft trees. Tensors only; knows no model."""

from ddtree.tree.build import Scorer, best_first, grow, merge, prune
from ddtree.tree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, on_host
from ddtree.tree.verify import ancestor_mask, following, walk

__all__ = [
    "MAX_BUDGET",
    "MAX_DEPTH",
    "DraftTree",
    "Scorer",
    "ancestor_mask",
    "best_first",
    "following",
    "grow",
    "merge",
    "on_host",
    "prune",
    "walk",
]
