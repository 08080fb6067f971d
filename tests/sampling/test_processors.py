"""Supports of top-k, top-p and min-p against a full sort and against transformers' warpers."""

import math

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ddtree.sampling.processors import best_ids, support

CASES = [
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (299, 1.0, 0.0),
    (0, 0.0, 0.0),
    (0, 0.3, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (40, 0.9, 0.0),
    (7, 0.5, 0.2),
    (0, 0.95, 0.02),
    (40, 1.0, 0.1),
    (10**6, 0.8, 0.0),
]


def by_full_sort(logits: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The definition, token by token, in Python floats."""
    values = logits.double().tolist()
    order = sorted((v for v in range(len(values)) if values[v] > -math.inf), key=lambda v: (-values[v], v))
    kept = order
    if 0 < top_k < len(kept):
        kept = [v for v in kept if values[v] >= values[kept[top_k - 1]]]
    if top_p < 1.0:
        weights = [math.exp(values[v] - values[kept[0]]) for v in kept]
        total = math.fsum(weights)
        nucleus: list[int] = []
        for v in kept:
            if nucleus and math.fsum(weights[: len(nucleus)]) / total >= top_p:
                break
            nucleus.append(v)
        kept = nucleus
    if min_p > 0.0:
        kept = [v for v in kept if values[v] >= values[order[0]] + math.log(min_p)]
    return sorted(kept)


def ours(logits: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    ids = support(logits, top_k, top_p, min_p)
    return list(range(logits.numel())) if ids is None else ids.tolist()


def random_logits(seed: int, size: int, spread: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def banned(seed: int) -> Tensor:
    """Logits of which ten are left."""
    logits = random_logits(seed, 400)
    logits[torch.randperm(400, generator=torch.Generator().manual_seed(seed))[:390]] = -math.inf
    return logits


LOGITS = {
    **{f"{size} tokens": lambda seed, n=size: random_logits(seed, n) for size in (3, 300, 2000)},
    "flat": lambda seed: random_logits(seed, 2000, spread=0.1),
    # bfloat16 logits have few distinct values, so ties at the cut are the rule.
    "ties": lambda seed: (random_logits(seed, 1000) * 2).round() / 2,
    "banned": banned,
}


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CASES)
@pytest.mark.parametrize("kind", LOGITS)
def test_equals_a_full_sort(top_k: int, top_p: float, min_p: float, kind: str) -> None:
    for seed in range(4):
        logits = LOGITS[kind](seed)
        assert ours(logits, top_k, top_p, min_p) == by_full_sort(logits, top_k, top_p, min_p)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CASES)
def test_equals_transformers_warpers(top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(6):
        logits = random_logits(seed, 1500)
        scores = logits.double()[None]
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(None, scores)
        if min_p:
            scores = MinPLogitsWarper(min_p)(None, scores)
        want = scores[0].isfinite().nonzero().flatten().tolist()
        assert ours(logits, top_k, top_p, min_p) == want


def test_top_k_keeps_all_that_equal_the_last() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 0.0])
    assert ours(logits, 3, 1.0, 0.0) == [0, 1, 2, 3, 4]
    assert TopKLogitsWarper(3)(None, logits[None])[0].isfinite().tolist() == [True] * 5 + [False]


def test_top_p_keeps_the_lower_ids_of_equals() -> None:
    assert ours(torch.zeros(8), 0, 0.5, 0.0) == [0, 1, 2, 3]
    assert ours(torch.zeros(1000), 0, 0.1, 0.0) == list(range(100))
    assert ours(torch.zeros(1000), 0, 0.9, 0.0) == list(range(900)), "beyond the leading few"


def test_all_off_keeps_all_without_looking() -> None:
    assert support(torch.zeros(5)) is None
    assert support(torch.zeros(5), top_k=5) is None


@pytest.mark.parametrize("count", [1, 3, 20, 500])
def test_best_ids_are_ordered_and_settle_ties_by_id(count: int) -> None:
    for seed in range(5):
        logits = random_logits(seed, 300).round()
        want = sorted(range(300), key=lambda v: (-logits[v].item(), v))[:count]
        assert best_ids(logits, count).tolist() == want
