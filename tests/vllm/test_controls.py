"""Without any one part of verification the texts are other ones: so the tests of equality can fail."""

from __future__ import annotations

import torch
from engines import PROMPTS, TOKENS, answers, engine, oracle, params

from ddtree.integrations.vllm import model_runner, tree_attention
from ddtree.tree import ancestor_mask


def matches(known):
    """Return how many of the texts are those of stock vLLM."""
    with engine(known[0], oracle(known)) as made:
        found = answers(made, PROMPTS, params(TOKENS))
    return sum(own == text for own, text in zip(found, known[1], strict=True))


def test_all_parts_together_give_all_texts(known):
    assert matches(known) == len(PROMPTS)


def test_a_causal_mask_gives_none(known, monkeypatch):
    monkeypatch.setattr(tree_attention, "ancestor_mask", lambda tree: ancestor_mask(tree).fill_(True).tril())
    assert matches(known) == 0


def test_linear_positions_give_none(known, monkeypatch):
    monkeypatch.setattr(model_runner, "_positions", lambda row: row.base + torch.arange(row.size))
    assert matches(known) == 0


def test_keys_and_values_left_where_they_are_give_none(known, monkeypatch):
    monkeypatch.setattr(model_runner.TreeRunner, "_compact", lambda self, verified: None)
    assert matches(known) == 0
