import math

import torch

from ddtree.policy.foretell import outcome, spine
from ddtree.tree import DraftTree

#     root -> 1 -> 3 -> 5,  root -> 2 -> 4
TREE = DraftTree(
    torch.tensor([[9, 1, 2, 3, 4, 5], [9, 7, 0, 0, 0, 0]]),
    torch.tensor([[0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0]]),
    torch.tensor([[0, 1, 1, 2, 2, 3], [0, 1, 0, 0, 0, 0]]),
    torch.tensor([[0.0, -0.1, -1.0, -1.1, -1.5, -2.0], [0.0, -0.5, *[-math.inf] * 4]]),
    [6, 2],
)


def test_nodes_that_the_answer_passes_through_are_accepted():
    for answer, accepted in (
        ([1, 3, 5, 8], [1, 0, 1, 0, 1]),
        ([2, 4], [0, 1, 0, 1, 0]),
        ([3], [0] * 5),
        ([], [0] * 5),
    ):
        found = outcome(TREE, 0, answer, chain=False)
        assert found.accepted.tolist() == [bool(value) for value in accepted]
        assert (
            found.depths.tolist() == [1, 1, 2, 2, 3]
            and found.logprobs.tolist() == TREE.logprobs[0, 1:].tolist()
        )


def test_of_a_chain_only_first_children_count():
    found = outcome(TREE, 0, [1, 3, 8], chain=True)
    assert found.depths.tolist() == [1, 2, 3] and found.accepted.tolist() == [True, True, False]
    assert not outcome(TREE, 0, [2, 4], chain=True).accepted.any()
    assert spine([0, 0, 0, 1, 2, 3]) == [1, 3, 5] and spine([0]) == []


def test_padding_is_no_node():
    assert outcome(TREE, 1, [7, 0], chain=False).accepted.tolist() == [True]
    assert len(outcome(TREE.truncate([0, 0]), 0, [1], chain=False).accepted) == 0
