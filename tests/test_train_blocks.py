"""Packing of draft blocks."""

import torch

from ddtree.train.blocks import IGNORED, pack, packed_mask, random_anchors

TEXT = torch.arange(100, 120)


def test_a_block_is_its_anchor_and_masks_at_the_following_positions():
    blocks = pack(TEXT, torch.tensor([3, 9]), block=4, mask_id=7)
    assert blocks.tokens.tolist() == [103, 7, 7, 7, 109, 7, 7, 7]
    assert blocks.positions.tolist() == [3, 4, 5, 6, 9, 10, 11, 12]
    assert blocks.labels.tolist() == [[104, 105, 106], [110, 111, 112]]
    assert blocks.context == 9


def test_labels_beyond_the_end_are_ignored():
    blocks = pack(TEXT, torch.tensor([18]), block=4, mask_id=7)
    assert blocks.labels.tolist() == [[119, IGNORED, IGNORED]]


def test_a_query_sees_the_context_before_its_anchor_and_its_own_block_only():
    anchors, block, context = torch.tensor([2, 5, 6]), 3, 6
    mask = packed_mask(anchors, block, context)
    for query in range(9):
        own = query // block
        expected = [j < anchors[own] for j in range(context)] + [j // block == own for j in range(9)]
        assert mask[query].tolist() == expected


def test_anchors_are_distinct_answer_positions_with_a_token_after_them():
    generator = torch.Generator().manual_seed(0)
    anchors = random_anchors(start=5, length=12, count=50, generator=generator)
    assert anchors.tolist() == [5, 6, 7, 8, 9, 10]
    few = random_anchors(start=5, length=1000, count=8, generator=generator)
    assert len(few.unique()) == 8
    assert few.tolist() == sorted(few.tolist())


def test_an_answer_of_one_token_has_no_anchor():
    assert len(random_anchors(start=5, length=6, count=8, generator=torch.Generator())) == 0
