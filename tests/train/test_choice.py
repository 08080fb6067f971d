"""Choosing tokens for many rows."""

import pytest
import torch

from ddtree.train.synthesize import draw, draw_nucleus, greedy


@pytest.mark.parametrize("size", [4, 256, 700])
def test_draws_follow_the_distribution(size):
    torch.manual_seed(size)
    logits = torch.randn(size) * 2
    uniform = (torch.arange(40_000) + 0.5) / 40_000
    counts = draw(logits.expand(40_000, size), uniform).bincount(minlength=size) / 40_000
    torch.testing.assert_close(counts, logits.softmax(-1), atol=1e-4, rtol=0)


def test_draws_are_the_inverse_of_the_running_sum():
    torch.manual_seed(0)
    logits, uniform = torch.randn(200, 1000), torch.rand(200)
    running = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(running, uniform.double()[:, None], right=True)[:, 0]
    assert torch.equal(draw(logits, uniform), expected)


def test_a_nucleus_holds_the_smallest_set_that_reaches_its_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    uniform = (torch.arange(1000) + 0.5) / 1000
    counts = draw_nucleus(logits.expand(1000, 4), uniform, 0.7).bincount(minlength=4) / 1000
    torch.testing.assert_close(counts, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=2e-3, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_the_ends_of_the_range_never_draw_a_token_without_mass(uniform):
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [300, 310]] = torch.tensor([3.0, 1.0])
    expected = 300 if uniform == 0 else 310
    assert draw(logits, torch.tensor([uniform])).tolist() == [expected]
    assert draw_nucleus(logits, torch.tensor([uniform]), 1.0).tolist() == [expected]


def test_greedy_takes_the_first_of_equals():
    assert greedy(torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.bfloat16)).tolist() == [1]
