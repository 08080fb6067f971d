"""The equality matrix: every family, drafter, sampling rule, budget and batch gives the plain loop's tokens."""

import functools

import pytest
import torch

import reference
import tiny
from ddtree.engine.engine import Engine
from ddtree.model.target import Target
from ddtree.sampling.sampler import SamplingParams
from scripted import Scripted

LENGTH = 200
BUDGETS = (1, 15, 64)
PROMPTS = [tiny.prompt(n, seed=n) for n in (6, 31, 14)]
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalty-and-bias": {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {3: 2.0, 5: -1.5}},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
}
DRAFTERS = ("none", "chain", "tree", "lookup", "draft", "merged", "scripted")
HEADS = ("markov", "treeflash", "domino", "d2sd", "continuity")


@functools.cache
def model_of(family):
    return tiny.model(family)


@functools.cache
def expected(family, sampling):
    model = model_of(family)
    return [
        reference.decode(model, prompt, SamplingParams(**SAMPLING[sampling], seed=seed), LENGTH)
        for seed, prompt in enumerate(PROMPTS)
    ]


@functools.cache
def drafter_for(family, kind, sampling):
    model = model_of(family)
    if kind == "none":
        return None
    if kind == "scripted":
        return Scripted([p + a for p, a in zip(PROMPTS, expected(family, sampling), strict=True)], reach=5)
    return tiny.drafter(kind, model)


def check(family, kind, sampling, budget, rows):
    drafter = drafter_for(family, kind, sampling)
    engine = Engine(Target(model_of(family)), drafter)
    method = "chain" if kind == "chain" else "tree"
    # A draft model runs once a level; four levels show all there is to see.
    depth = 4 if kind in ("draft", "merged") else 16
    sequences = [
        engine.add(
            PROMPTS[i],
            SamplingParams(**SAMPLING[sampling], seed=i, max_tokens=LENGTH),
            method=method,
            budget=budget,
            depth=depth,
        )
        for i in range(rows)
    ]
    while not engine.idle:
        engine.step()
    engine.target.close()
    for sequence, answer in zip(sequences, expected(family, sampling), strict=False):
        assert sequence.output == answer, f"budget {budget}, {rows} rows"
    if kind == "scripted" and budget > 1:
        assert sequences[0].stats.tau > 3


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.xdist_group(f)) for f in tiny.FAMILIES])
def test_tokens_are_those_of_the_plain_loop(family, kind, sampling):
    for budget in BUDGETS if kind != "none" else (0,):
        for rows in (1, 3):
            check(family, kind, sampling, budget, rows)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.xdist_group(f)) for f in ("llama", "gemma2")]
)
def test_heads_on_a_backbone_do_not_change_them_either(family, kind, sampling):
    for budget, rows in ((1, 3), (15, 1), (64, 3)):
        check(family, kind, sampling, budget, rows)


def test_a_wrong_rule_would_be_noticed(monkeypatch):
    """The matrix has power: a verification that ignores the tree's mask does not pass it."""
    from ddtree.model import target as target_module

    def causal(tree):
        rows, nodes = tree.tokens.shape
        return torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, nodes, nodes)

    monkeypatch.setattr(target_module, "ancestor_mask", causal)
    with pytest.raises(AssertionError):
        check("llama", "scripted", "greedy", 15, 1)
