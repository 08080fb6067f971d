"""Packing of draft blocks."""

import torch

import tiny
from ddtree.train.batches import GROUP, IGNORED, Batch, block_states, pack, packed_mask

TEXT = torch.arange(100, 120)


def batch(anchors, known=None, lengths=None, texts=None):
    anchors = torch.tensor(anchors)
    texts = TEXT.expand(len(anchors), -1) if texts is None else texts
    return Batch(
        texts,
        torch.tensor(lengths or [texts.shape[1]] * len(anchors)),
        anchors,
        torch.zeros_like(anchors) if known is None else torch.tensor(known),
        int(anchors.max()),
        list(range(len(anchors))),
    )


def test_a_block_is_its_anchor_and_masks_at_the_following_positions():
    blocks = pack(batch([[3, 9]]), block=4, mask_id=7)
    assert blocks.tokens.tolist() == [[103, 7, 7, 7, 109, 7, 7, 7]]
    assert blocks.positions.tolist() == [[3, 4, 5, 6, 9, 10, 11, 12]]
    assert blocks.labels.tolist() == [[[104, 105, 106], [110, 111, 112]]]
    assert blocks.in_text.all()
    assert blocks.context == 9


def test_labels_beyond_a_conversations_end_are_ignored():
    blocks = pack(batch([[18], [14]], lengths=[20, 16]), block=4, mask_id=7)
    assert blocks.labels.tolist() == [[[119, IGNORED, IGNORED]], [[115, IGNORED, IGNORED]]]
    assert blocks.in_text.tolist() == [[[True, False, False]], [[True, False, False]]]


def test_given_tokens_follow_the_anchor_and_are_not_predicted():
    blocks = pack(batch([[3, 9]], known=[[2, 0]]), block=4, mask_id=7)
    assert blocks.tokens.tolist() == [[103, 104, 105, 7, 109, 7, 7, 7]]
    assert blocks.labels.tolist() == [[[IGNORED, IGNORED, 106], [110, 111, 112]]]
    assert blocks.prefix_lengths.tolist() == [[2, 0]]


def test_a_block_that_is_not_there_predicts_nothing():
    blocks = pack(batch([[3, 0]], known=[[0, -1]]), block=4, mask_id=7)
    assert blocks.labels[0, 1].tolist() == [IGNORED] * 3
    assert not blocks.in_text[0, 1].any()
    # It sees its own slots, so that its attention is defined.
    assert blocks.mask[0, 4:].any(dim=1).all()


def test_a_query_sees_the_context_before_its_anchor_and_its_own_block_only():
    anchors, block, context = torch.tensor([[2, 5, 6], [1, 1, 4]]), 3, 6
    mask = packed_mask(anchors, block, context)
    for row in range(2):
        for query in range(9):
            own = query // block
            expected = [j < anchors[row, own] for j in range(context)] + [j // block == own for j in range(9)]
            assert mask[row, query].tolist() == expected


def test_attention_runs_over_a_few_blocks_at_a_time_and_gives_the_same():
    random = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, 60, (2, 2 * GROUP), generator=random).sort(dim=1).values
    texts = torch.randint(0, tiny.VOCAB, (2, 80), generator=random)
    many = batch(anchors.tolist(), texts=texts)
    net = tiny.network(tiny.model("llama"), block_size=4)
    shape = net.config
    embedding = torch.randn(shape.vocab_size, shape.hidden_size)
    features = torch.randn(2, 80, len(shape.target_layer_ids), shape.hidden_size)
    states, blocks = block_states(net, embedding, many, features)
    assert blocks.mask.shape == (4, 4 * GROUP, many.context + 4 * GROUP)
    for place in range(2 * GROUP):
        one = batch(anchors[:, place : place + 1].tolist(), texts=texts)
        alone, _ = block_states(net, embedding, one, features)
        torch.testing.assert_close(states[:, place], alone[:, 0], rtol=1e-4, atol=1e-5)
