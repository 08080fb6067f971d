"""Sampling: the text of this package's own engine for the same seed, and right log-probabilities."""

from __future__ import annotations

import pytest
import torch
from engines import FAMILIES, PROMPTS, answers, counters, engine, params

import ddtree
import tiny
from scripted import Scripted

TOKENS = 48
ASKED = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"temperature": 1.3, "top_k": 12, "seed": 5},
    {"temperature": 0.9, "min_p": 0.05, "seed": 6},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "seed": 7,
    },
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {5: 3.0, 9: -50.0}},
    {"temperature": 0.8, "bad_words": [[7], [3, 4]], "seed": 8},
]
ELSEWHERE = ("min_p", "logit_bias")
"""Fields that vLLM takes in a request's `extra_args` beside drafting."""


@pytest.fixture(scope="module")
def known(checkpoints):
    """A model's folder, and the answers of our own engine without drafting, by what was asked."""
    folder = checkpoints("llama")
    with ddtree.load(tiny.model("llama", **FAMILIES["llama"]), "none") as model:
        return folder, [
            [
                list(model.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **own).token_ids)
                for prompt in PROMPTS
            ]
            for own in ASKED
        ]


def given(own):
    """The same for vLLM."""
    elsewhere = {name: own[name] for name in ELSEWHERE if name in own}
    kept = {name: value for name, value in own.items() if name not in (*ELSEWHERE, "bad_words")}
    made = params(TOKENS, extra_args={"ddtree": elsewhere} if elsewhere else None, **kept)
    # What the front end makes of words, where it has a tokenizer.
    made._bad_words_token_ids = own.get("bad_words")
    return made


@pytest.mark.parametrize("reach", [0, 4])
def test_the_text_is_that_of_our_own_engine_for_the_same_seed(known, reach):
    texts = [prompt + text for own in known[1] for prompt, text in zip(PROMPTS, own, strict=True)]
    with engine(known[0], lambda spec, target: Scripted(texts, reach)) as made:
        for own, expected in zip(ASKED, known[1], strict=True):
            assert answers(made, PROMPTS, given(own)) == expected, own
        found = counters(made)
    assert found["accepted"] > found["steps"] or not reach


def test_requests_without_a_seed_differ_and_sample(known):
    with engine(known[0], lambda spec, target: Scripted([])) as made:
        found = answers(made, [PROMPTS[0]] * 6, params(TOKENS, temperature=1.5))
    assert len({tuple(text) for text in found}) == 6


def test_several_answers_of_a_prompt_have_seeds_of_their_own(known):
    drawn = {"temperature": 1.0, "seed": 3}
    with engine(known[0], lambda spec, target: Scripted([])) as made:
        (several,) = made.generate(
            [{"prompt_token_ids": PROMPTS[0]}], params(TOKENS, n=3, **drawn), use_tqdm=False
        )
        alone = [
            answers(made, PROMPTS[:1], params(TOKENS, **{**drawn, "seed": seed}))[0] for seed in (3, 4, 5)
        ]
    assert [list(answer.token_ids) for answer in several.outputs] == alone


def test_tokens_that_the_model_lacks_do_not_end_the_engine(known):
    asked = params(TOKENS, **ASKED[0], extra_args={"ddtree": {"logit_bias": {10**6: 100.0}}})
    asked._bad_words_token_ids = [[10**6]]
    with engine(known[0], lambda spec, target: Scripted([])) as made:
        assert answers(made, PROMPTS, asked) == known[1][0]


def test_end_of_text_waits_for_min_tokens(known):
    text = known[1][0][0]
    with engine(known[0], lambda spec, target: Scripted([PROMPTS[0] + text])) as made:
        own = {**ASKED[0], "stop_token_ids": [text[4]], "min_tokens": 12}
        asked = params(TOKENS, **own)
        asked.ignore_eos = False
        found = answers(made, [PROMPTS[0]], asked)[0]
    assert text[4] not in found[:11] and len(found) >= 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_the_models_own(known, temperature):
    asked = params(24, temperature=temperature, seed=3, logprobs=4)
    with engine(known[0]) as stock:
        greedy = [answers(stock, [prompt], params(24))[0] for prompt in PROMPTS]
    texts = [
        prompt + text for prompt, text in zip(PROMPTS, known[1][0] if temperature else greedy, strict=True)
    ]
    with engine(known[0], lambda spec, target: Scripted(texts)) as made:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        reports = [result.outputs[0] for result in made.generate(prompts, asked, use_tqdm=False)]
        assert counters(made)["accepted"] > counters(made)["steps"] / 2
    model = tiny.model("llama", **FAMILIES["llama"])
    for prompt, report in zip(PROMPTS, reports, strict=True):
        tokens = list(report.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(dim=-1)
        assert len(report.logprobs) == len(tokens)
        for token, row, told in zip(tokens, expected, report.logprobs, strict=True):
            assert token in told and len(told) >= 4
            for other, entry in told.items():
                assert abs(entry.logprob - float(row[other])) < 1e-4
            best = row.topk(4).indices.tolist()
            assert {other for other, entry in told.items() if entry.rank <= 4} == set(best)
