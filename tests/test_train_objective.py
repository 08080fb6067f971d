"""The training objective."""

import math

import pytest
import torch

from ddtree.train.blocks import IGNORED, pack
from ddtree.train.objective import Vocabulary, block_loss, slot_weights

HEAD = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
TEXT = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


def scores(count, slots, size):
    return torch.randn(count, slots, size, generator=torch.Generator().manual_seed(2))


def test_slots_count_less_and_less():
    torch.testing.assert_close(slot_weights(3, 4.0), torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5)]))


def test_hard_loss_is_the_weighted_cross_entropy_of_what_came():
    blocks = pack(TEXT, torch.tensor([2, 10]), block=4, mask_id=0)
    vocabulary = Vocabulary(None, HEAD)
    given = scores(2, 3, 20)
    loss = block_loss(given, blocks, HIDDEN, vocabulary, gamma=4.0, soft=0.0)
    expected = weight = 0.0
    for block, anchor in enumerate((2, 10)):
        for slot in range(3):
            if anchor + 1 + slot < len(TEXT):
                w = math.exp(-slot / 4)
                expected -= w * float(given[block, slot].log_softmax(-1)[TEXT[anchor + 1 + slot]])
                weight += w
    assert float(loss.total) == pytest.approx(expected, rel=1e-5) == pytest.approx(loss.hard, rel=1e-5)
    assert loss.weight == pytest.approx(weight, rel=1e-5)


def test_soft_loss_is_least_when_the_drafter_equals_the_target():
    blocks = pack(TEXT, torch.tensor([2, 5]), block=4, mask_id=0)
    vocabulary = Vocabulary(None, HEAD)
    before = blocks.positions.view(2, 4)[:, :-1]
    same = vocabulary.logits(HIDDEN)[before]
    best = block_loss(same, blocks, HIDDEN, vocabulary, gamma=4.0, soft=1.0)
    for seed in range(3):
        noise = torch.randn(same.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
        assert block_loss(same + noise, blocks, HIDDEN, vocabulary, 4.0, soft=1.0).total > best.total


def test_tokens_outside_the_draft_vocabulary_do_not_count():
    ids = torch.tensor([1, 3, 4, 5])
    vocabulary = Vocabulary(ids, HEAD)
    assert vocabulary.index(torch.tensor([5, 9, 1, IGNORED])).tolist() == [3, IGNORED, 0, IGNORED]
    blocks = pack(
        TEXT, torch.tensor([4]), block=4, mask_id=0
    )  # followed by 9, 2, 6: none of them in the vocabulary
    loss = block_loss(scores(1, 3, 4), blocks, HIDDEN, vocabulary, gamma=4.0, soft=0.0)
    assert loss.weight == 0.0
    assert loss.accepted == 0


def test_draft_logits_are_those_rows_of_the_targets_head():
    bias = torch.randn(20, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([2, 7, 11])
    torch.testing.assert_close(Vocabulary(ids, HEAD, bias).logits(HIDDEN), (HIDDEN @ HEAD.T + bias)[:, ids])


def test_a_chain_is_accepted_up_to_its_first_wrong_slot():
    blocks = pack(TEXT, torch.tensor([2, 5]), block=4, mask_id=0)
    given = torch.nn.functional.one_hot(blocks.labels, 20).float()
    given[0, 1] = 0.0
    loss = block_loss(given, blocks, HIDDEN, Vocabulary(None, HEAD), gamma=4.0, soft=0.0)
    assert (loss.accepted, loss.blocks) == (1 + 3, 2)


@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
def test_the_gradient_is_autograds(soft):
    blocks = pack(TEXT, torch.tensor([2, 5, 10]), block=4, mask_id=0)
    vocabulary = Vocabulary(torch.tensor([1, 2, 3, 5, 6, 8]), HEAD)
    ours = scores(3, 3, 6).requires_grad_()
    loss = block_loss(ours, blocks, HIDDEN, vocabulary, gamma=4.0, soft=soft)
    (loss.total / 7).backward()
    plain = scores(3, 3, 6).requires_grad_()
    labels = vocabulary.index(blocks.labels)
    weights = slot_weights(3, 4.0) * (labels != IGNORED)
    label = (1 - soft) * torch.nn.functional.one_hot(labels.clamp(min=0), 6)
    before = blocks.positions.view(3, 4)[:, :-1].clamp(max=len(HIDDEN) - 1)
    label = label + soft * vocabulary.logits(HIDDEN).softmax(-1)[before]
    expected = -((label * plain.log_softmax(-1)).sum(-1) * weights).sum()
    (expected / 7).backward()
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(ours.grad, plain.grad)
