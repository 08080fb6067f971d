"""A small language model as drafter: the text of plain vLLM, and of our own engine for a seed."""

from __future__ import annotations

import pytest
import torch
from engines import FAMILIES, PROMPTS, TOKENS, answers, counters, drafted, engine, params

import ddtree
import tiny
from ddtree.drafters.loading import load_drafter
from ddtree.errors import CheckpointError

DRAWN = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """The name of a drafter: the model itself with its weights shaken, so that some of its guesses come true."""
    model = tiny.model("llama", **FAMILIES["llama"])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("draft")
    model.save_pretrained(folder)
    return f"draft:{folder}"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"method": "chain", "budget": 4},
        {"method": "auto", "budget": "auto"},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 11},
    ],
    ids=str,
)
def test_texts_are_those_of_plain_vllm(known, draft, arguments):
    found = drafted(known, load_drafter, times=2, drafter=draft, **arguments)
    assert found["accepted"] and not found["drafting_failed"]


def test_sampled_texts_are_those_of_our_own_engine(known, draft):
    with ddtree.load(tiny.model("llama", **FAMILIES["llama"]), "none") as model:
        expected = [
            list(model.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **DRAWN).token_ids)
            for prompt in PROMPTS
        ]
    with engine(known[0], load_drafter, drafter=(draft, "lookup")) as made:
        assert answers(made, PROMPTS, params(TOKENS, **DRAWN)) == expected
        assert counters(made)["accepted"]


def test_another_vocabulary_is_refused_by_name(known, tmp_path):
    tiny.model("llama", **{**FAMILIES["llama"], "vocab_size": 64}).save_pretrained(tmp_path)
    with (
        pytest.raises(CheckpointError, match="64 tokens and the target 48"),
        engine(known[0], load_drafter, drafter=f"draft:{tmp_path}"),
    ):
        pass
