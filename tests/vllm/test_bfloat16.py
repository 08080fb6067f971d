"""The demo pair in bfloat16: a text parts from plain vLLM's at a near-tie, or not at all.

`pytest -s` shows the places, of draft trees and, beside them, of plain vLLM that decodes the prompts together.
"""

from __future__ import annotations

import pytest
from engines import answers, counters, engine, params

import ddtree
from ddtree.bench import prompt_sets
from ddtree.bench.near_ties import first_difference
from ddtree.drafters.loading import load_drafter
from ddtree.integrations.vllm import tree_attention
from ddtree.model.demo import demo_target
from ddtree.tree import ancestor_mask

TOKENS = 24
ROOM = {"dtype": "bfloat16", "max_model_len": 512, "num_gpu_blocks_override": 160}


@pytest.fixture(scope="module")
def model():
    """The same weights in our own engine, whose forward pass measures how far rounding goes."""
    with ddtree.load("demo", "none", dtype="bfloat16", device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(model):
    chosen = prompt_sets.read([prompt_sets.SMALL], limit=6)
    return [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.turns[0]}], add_generation_prompt=True, return_dict=False
        )
        for prompt in chosen
    ]


@pytest.fixture(scope="module")
def plain(prompts):
    """Of plain vLLM, prompt by prompt: tokens, their log-probabilities beside others', tokens decoded together."""
    with engine(demo_target(), **ROOM) as stock:
        found = []
        for prompt in prompts:
            (result,) = stock.generate(
                [{"prompt_token_ids": prompt}], params(TOKENS, logprobs=20), use_tqdm=False
            )
            found.append((list(result.outputs[0].token_ids), result.outputs[0].logprobs))
        together = answers(stock, prompts, params(TOKENS))
    return [(*own, other) for own, other in zip(found, together, strict=True)]


def drafted(prompts):
    with engine(demo_target(), load_drafter, drafter="demo", **ROOM) as made:
        found = answers(made, prompts, params(TOKENS))
        assert counters(made)["accepted"] > counters(made)["steps"] / 5
    return found


def partings(model, prompts, plain, others, name):
    """Of each text that parts: log-probabilities between the two tokens as plain vLLM sees them, and the noise."""
    found = []
    for index, (prompt, (tokens, seen, _), other) in enumerate(zip(prompts, plain, others, strict=True)):
        difference = first_difference(model.target, prompt, tokens, other)
        if difference is None:
            continue
        first, second = (seen[difference.index].get(token) for token in difference.tokens)
        gap = first.logprob - second.logprob if first and second else float("inf")
        found.append((gap, difference.noise))
        pair = " or ".join(repr(model.tokenizer.decode([token])) for token in difference.tokens)
        print(
            f"{name}: prompt {index}, token {difference.index}, {pair}: gap {gap:.4f}, noise {difference.noise:.4f}"
        )
    print(f"{name}: {len(prompts) - len(found)} of {len(prompts)} texts are plain vLLM's")
    return found


def test_texts_part_at_near_ties_alone(model, prompts, plain):
    for name, others in (("together", [own[2] for own in plain]), ("trees", drafted(prompts))):
        found = partings(model, prompts, plain, others, name)
        assert all(gap <= noise for gap, noise in found), found


def test_without_the_trees_mask_they_part_elsewhere(model, prompts, plain, monkeypatch):
    monkeypatch.setattr(tree_attention, "ancestor_mask", lambda tree: ancestor_mask(tree).fill_(True).tril())
    few = prompts[:2]
    found = partings(model, few, plain[:2], drafted(few), "causal mask")
    assert any(gap > noise for gap, noise in found)
