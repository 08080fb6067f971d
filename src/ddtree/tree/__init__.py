"""Draft trees: grown, built best first, pruned, merged, masked and walked. Tensors only; knows no model."""

from ddtree.tree.best_first import best_first
from ddtree.tree.draft_tree import MAX_BUDGET, MAX_DEPTH, DraftTree
from ddtree.tree.grow import Scorer, grow
from ddtree.tree.mask import ancestor_mask
from ddtree.tree.merge import merge
from ddtree.tree.prune import prune
from ddtree.tree.walk import walk

__all__ = [
    "MAX_BUDGET",
    "MAX_DEPTH",
    "DraftTree",
    "Scorer",
    "ancestor_mask",
    "best_first",
    "grow",
    "merge",
    "prune",
    "walk",
]
