"""The training objective."""

import math
from dataclasses import replace

import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.train.arguments import Objective
from ddtree.train.batches import IGNORED, Batch, pack
from ddtree.train.loss import CROSS_ENTROPY, OBJECTIVE, WEIGHT, Vocabulary, head_loss, labels_of
from ddtree.train.loss import dpace_weights as weights_of

HEAD = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(1))
TEXTS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 0, 0]])
LENGTHS = torch.tensor([12, 10])
ANCHORS = torch.tensor([[2, 5, 10], [1, 4, 0]])
KNOWN = torch.tensor([[0, 0, 0], [0, 2, -1]])
BATCH = Batch(TEXTS, LENGTHS, ANCHORS, KNOWN, 10, [0, 1])
SOME = Vocabulary(torch.tensor([1, 2, 3, 5, 6, 8]), HEAD)
ALL = Vocabulary(None, HEAD)


def states():
    return torch.randn(2, 3, 3, 6, generator=torch.Generator().manual_seed(2))


def first(batch=BATCH, **changes):
    """The first conversation alone."""
    alone = Batch(TEXTS[:1], LENGTHS[:1], ANCHORS[:1], KNOWN[:1], 10, [0])
    return replace(alone, **changes)


def measure(normed, vocabulary, objective, batch=BATCH, **options):
    blocks = pack(batch, block=4, mask_id=0)
    return head_loss(normed, batch, blocks, HIDDEN[: len(normed)], vocabulary, objective, **options)


def plain(normed, vocabulary, objective):
    """The same by loops over slots, differentiable."""
    total = torch.zeros(())
    hard_total = weight_total = 0.0
    ids = list(range(20)) if vocabulary.ids is None else vocabulary.ids.tolist()
    for row in range(2):
        for block in range(3):
            anchor, known = int(ANCHORS[row, block]), int(KNOWN[row, block])
            if known < 0:
                continue
            found = []
            for slot in range(known, 3):
                if anchor + 1 + slot < LENGTHS[row]:
                    logq = (normed[row, block, slot] @ HEAD[ids].T).log_softmax(-1)
                    teacher = (HIDDEN[row, anchor + slot] @ HEAD[ids].T).softmax(-1)
                    token = int(TEXTS[row, anchor + 1 + slot])
                    hard = -logq[ids.index(token)] if token in ids else None
                    found.append((slot - known, hard, -(teacher * logq).sum()))
            survival, reached = 1.0, []
            for _, hard, _ in found:
                probability = 0.0 if hard is None else float(torch.exp(-hard).detach())
                survival *= (1 - objective.alpha) * probability + objective.alpha
                reached.append(survival)
            for index, (distance, hard, soft) in enumerate(found):
                weight = math.exp(-distance / objective.gamma)
                if objective.loss == "dpace":
                    weight = sum(reached[index:])
                if objective.loss == "kl":
                    total, weight_total = total + weight * soft, weight_total + weight
                elif hard is not None:
                    share = objective.soft
                    total = total + weight * ((1 - share) * hard + share * soft)
                    hard_total, weight_total = hard_total + weight * float(hard), weight_total + weight
    return total, hard_total, weight_total


@pytest.mark.parametrize("vocabulary", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize(
    "objective",
    [
        Objective("ce", 4.0),
        Objective("ce", 4.0, soft=0.3),
        Objective("ce", 2.0, soft=1.0),
        Objective("kl", 4.0),
        Objective("dpace"),
        Objective("dpace", soft=0.5, alpha=0.2),
    ],
    ids=str,
)
def test_objective_and_gradient_are_those_of_a_loop_over_slots(objective, vocabulary):
    normed = states().requires_grad_()
    expected, hard, weight = plain(normed, vocabulary, objective)
    expected.backward()
    sums, derived = measure(states(), vocabulary, objective)
    torch.testing.assert_close(sums[OBJECTIVE], expected.detach())
    torch.testing.assert_close(derived, normed.grad, rtol=1e-4, atol=1e-6)
    if objective.loss == "ce":
        assert float(sums[CROSS_ENTROPY]) == pytest.approx(hard, rel=1e-5)
        assert float(sums[WEIGHT]) == pytest.approx(weight, rel=1e-5)
    if objective.loss == "dpace":
        assert float(sums[WEIGHT]) == 5  # blocks


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("objective", [Objective("ce", soft=0.4), Objective("dpace", soft=0.4)], ids=str)
def test_chunks_change_nothing(objective, chunk):
    whole, gradient = measure(states(), SOME, objective)
    parts, derived = measure(states(), SOME, objective, chunk=chunk)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(derived, gradient)


def test_a_batch_is_the_sum_of_its_conversations():
    objective = Objective("ce", soft=0.5)
    together, gradient = measure(states(), SOME, objective)
    alone, own = measure(states()[:1], SOME, objective, batch=first())
    rest = replace(
        BATCH,
        tokens=TEXTS[1:],
        lengths=LENGTHS[1:],
        anchors=ANCHORS[1:],
        prefix_lengths=KNOWN[1:],
        indices=[1],
    )
    blocks = pack(rest, block=4, mask_id=0)
    other, others = head_loss(states()[1:], rest, blocks, HIDDEN[1:], SOME, objective)
    torch.testing.assert_close(together, alone + other)
    torch.testing.assert_close(gradient, torch.cat([own, others]))


def test_a_blocks_gradient_does_not_depend_on_the_blocks_beside_it():
    objective = Objective("dpace", soft=0.5)
    _, gradient = measure(states(), SOME, objective)
    changed = states()
    changed[0, 0] += 1.0
    changed[1] -= 1.0
    _, after = measure(changed, SOME, objective)
    assert torch.equal(after[0, 1:], gradient[0, 1:])
    assert not torch.equal(after[0, 0], gradient[0, 0])


def test_soft_loss_is_least_when_the_drafter_equals_the_target():
    places = ANCHORS[0, :2, None] + torch.arange(3)
    same = HIDDEN[0][places][None]
    batch = first(anchors=ANCHORS[:1, :2], prefix_lengths=KNOWN[:1, :2])
    best, gradient = measure(same, ALL, Objective("kl"), batch=batch)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)
    for seed in range(3):
        noise = torch.randn(same.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
        assert measure(same + noise, ALL, Objective("kl"), batch=batch)[0][OBJECTIVE] > best[OBJECTIVE]


def test_tokens_outside_the_draft_vocabulary_do_not_count():
    vocabulary = Vocabulary(torch.tensor([1, 3, 4, 5]), HEAD)
    assert vocabulary.index(torch.tensor([5, 9, 1, IGNORED])).tolist() == [3, IGNORED, 0, IGNORED]
    # Followed by 9, 2, 6: none of them in the vocabulary.
    batch = first(anchors=torch.tensor([[4]]), prefix_lengths=torch.tensor([[0]]))
    sums, derived = measure(states()[:1, :1], vocabulary, Objective("ce", soft=0.5), batch=batch)
    assert sums[:4].tolist() == [0.0] * 4
    assert not derived.any()


def test_draft_logits_are_those_rows_of_the_targets_head():
    ids = torch.tensor([2, 7, 11])
    torch.testing.assert_close(Vocabulary(ids, HEAD).logits(HIDDEN), (HIDDEN @ HEAD.T)[..., ids])


def test_a_chain_is_accepted_up_to_its_first_wrong_slot():
    head = torch.eye(20)
    batch = first(anchors=torch.tensor([[2, 5]]), prefix_lengths=torch.tensor([[0, 0]]))
    blocks = pack(batch, block=4, mask_id=0)
    given = head[blocks.labels]
    given[0, 0, 1] = 0.0
    sums, _ = head_loss(given, batch, blocks, None, Vocabulary(None, head), Objective("ce"))
    assert sums[3:].tolist() == [1 + 3, 2]


def test_dpace_weights_are_the_slope_of_the_expected_length():
    batch = first(anchors=torch.tensor([[2, 10]]), prefix_lengths=torch.tensor([[0, 0]]))
    labels = labels_of(pack(batch, block=4, mask_id=0), ALL)
    chances = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.6, 0.6]], requires_grad=True)
    # The second block has one slot within the text.
    length = chances[0].cumprod(0).sum() + chances[1, 0]
    length.backward()
    weights = weights_of(-chances.detach().log(), labels, alpha=0.0)
    # d length / d log p, which is what a cross-entropy with these weights climbs.
    torch.testing.assert_close(weights, chances.grad * chances.detach())


@pytest.mark.parametrize("settings", [{"loss": "mse"}, {"gamma": 0.0}, {"soft": 1.5}, {"alpha": -1.0}])
def test_objectives_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Objective(**settings)
