"""A difference of two texts is a near-tie only where the forward pass itself is that uncertain."""

import math

import pytest
import torch

import tiny
from ddtree.bench import near_ties
from ddtree.bench.near_ties import first_difference
from ddtree.model.target import Target
from ddtree.sampling.noise import Noise

PROMPT = [5, 9, 2, 30, 7, 11, 4]
ANSWER = [3, 8, 21, 13, 40, 17]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny.model("llama"))


def scores(target: Target, prefix: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return target.model(torch.tensor([prefix]), use_cache=False).logits[0, -1].float()


def test_equal_outputs_have_no_difference(target: Target) -> None:
    assert first_difference(target, PROMPT, ANSWER, list(ANSWER)) is None
    assert first_difference(target, PROMPT, [], []) is None


def test_the_gap_is_that_of_the_scores_where_the_texts_part(target: Target) -> None:
    difference = first_difference(target, PROMPT, ANSWER, [*ANSWER[:3], 14, 1])
    assert difference is not None
    there = scores(target, PROMPT + ANSWER[:3])
    assert (difference.index, difference.tokens) == (3, (13, 14))
    assert difference.gap == pytest.approx(abs(float(there[13] - there[14])), abs=1e-4)
    assert difference.noise < 1e-3
    assert not difference.near_tie


def test_sampled_scores_include_the_noise_of_their_position(target: Target) -> None:
    difference = first_difference(target, PROMPT, ANSWER, [*ANSWER[:3], 14, 1], temperature=0.7, seed=5)
    assert difference is not None
    scored = scores(target, PROMPT + ANSWER[:3]) / 0.7
    scored = scored + Noise(5, target.vocab_size).gumbel(len(PROMPT) + 3)
    assert difference.gap == pytest.approx(abs(float(scored[13] - scored[14])), abs=1e-3)


def test_equal_scores_are_a_near_tie() -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.lm_head.weight[14] = model.lm_head.weight[13]
    difference = first_difference(Target(model), PROMPT, ANSWER, [*ANSWER[:3], 14])
    assert difference is not None and difference.near_tie


def test_rounding_of_bfloat16_is_measured() -> None:
    target = Target(tiny.model("llama").to(torch.bfloat16))
    difference = first_difference(target, PROMPT * 4, ANSWER, [7])
    assert difference is not None
    assert 1e-4 < difference.noise < 1.0


def test_a_shorter_text_is_never_a_near_tie(target: Target) -> None:
    difference = first_difference(target, PROMPT, ANSWER, ANSWER[:4])
    assert difference is not None and difference.index == 4
    assert math.isinf(difference.gap) and not difference.near_tie


def test_a_choice_that_one_shape_of_the_forward_finds_a_near_tie_is_one(target: Target, monkeypatch) -> None:
    """Logits about 34 lie 0.25 apart in bfloat16: a gap may be 0.17 in one shape and 0.42 in another."""
    shapes = {"_one_at_a_time": 0.17, "_at_once": 0.42}
    for name, gap in shapes.items():
        logits = torch.zeros(3, target.vocab_size)
        logits[:, 5], logits[:, 7] = 3.0 + gap, 3.0
        monkeypatch.setattr(near_ties, name, lambda *_, logits=logits: logits)
    difference = first_difference(target, [1, 2, 3, 4], [5], [7])
    assert difference is not None and difference.gap == pytest.approx(0.17, abs=1e-5)
