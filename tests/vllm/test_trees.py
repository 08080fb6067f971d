"""Trees as the scheduler sends them back."""

from __future__ import annotations

import torch

from ddtree.integrations.vllm.trees import Nodes
from ddtree.tree import DraftTree

TREE = Nodes([5, 6, 7, 8], [0, 0, 0, 1], [0, 1, 1, 2])


def test_a_whole_list_is_the_tree():
    assert TREE.as_scheduled(5, [6, 7, 8]) == TREE
    assert not TREE.is_chain


def test_a_cut_list_is_a_smaller_tree():
    assert TREE.as_scheduled(5, [6, 7]) == Nodes([5, 6, 7], [0, 0, 0], [0, 1, 1])
    assert TREE.as_scheduled(5, [6]).is_chain
    assert TREE.as_scheduled(5, []) == Nodes.chain([5])


def test_another_list_is_a_chain():
    for root, drafted in ((4, [6, 7, 8]), (5, [6, 8]), (5, [0, 0, 0, 0])):
        found = TREE.as_scheduled(root, drafted)
        assert found == Nodes.chain([root, *drafted]) and found.is_chain


def test_nodes_see_themselves_and_their_ancestors():
    assert [[int(seen) for seen in row] for row in TREE.visible()] == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 1],
    ]


def test_a_row_of_a_batch_is_without_padding():
    batch = DraftTree.stack([DraftTree.root([3]), DraftTree(*map(_row, TREE_COLUMNS), [4])])
    assert Nodes.of(batch, 0) == Nodes.chain([3])
    assert Nodes.of(batch, 1) == TREE


TREE_COLUMNS = (TREE.tokens, TREE.parents, TREE.depths, [0.0, -1.0, -2.0, -3.0])


def _row(values):
    return torch.tensor([values])
