"""The demo pair in float32: texts of stock vLLM with every way to draft that ships."""

from __future__ import annotations

import pytest
from engines import answers, counters, engine, params

import ddtree
from ddtree.drafters.loading import load_drafter
from ddtree.model.demo import demo_target

TEXTS = ["The capital of France is", "def fibonacci(n):\n", "one, two, three, one, two, three, one,"]
TOKENS = 40
ROOM = {"max_model_len": 512, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def prompts():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_target())
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def known(prompts):
    with engine(demo_target(), **ROOM) as stock:
        return [answers(stock, [prompt], params(TOKENS))[0] for prompt in prompts]


@pytest.fixture(scope="module")
def sampled(prompts):
    with ddtree.load("demo", "none", dtype="float32", device="cpu") as model:
        return [
            model.generate(
                prompt, max_tokens=TOKENS, temperature=0.8, top_p=0.95, seed=5, ignore_eos=True
            ).token_ids
            for prompt in prompts
        ]


@pytest.mark.parametrize(
    "drafter",
    ["demo", "demo/dflash", "demo/treeflash", "demo/domino", "demo/d2sd", ("demo/dflash", "lookup")],
)
def test_texts_are_those_of_stock_vllm_and_of_our_own_engine(prompts, known, sampled, drafter):
    asked = params(TOKENS, temperature=0.8, top_p=0.95, seed=5)
    with engine(demo_target(), load_drafter, drafter=drafter, **ROOM) as made:
        assert answers(made, prompts, params(TOKENS)) == known
        greedy = counters(made)
        assert answers(made, prompts, asked) == sampled
    assert greedy["accepted"] > greedy["steps"] / 5, greedy
