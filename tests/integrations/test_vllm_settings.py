"""Fields of a request to vLLM and their ranges, without vLLM."""

import json
from types import SimpleNamespace

import pytest

from ddtree.errors import ConfigError
from ddtree.integrations.vllm.request_state import within_vocabulary
from ddtree.integrations.vllm.settings import (
    REFUSED_FIELDS,
    RequestFields,
    refused_field,
    sampling_params,
)
from ddtree.sampling.noise import MAX_SEED

PLAIN = dict(
    temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
    min_tokens=0, max_tokens=16, seed=None, _bad_words_token_ids=None, **dict.fromkeys(REFUSED_FIELDS),
)  # fmt: skip


def params(**fields):
    return SimpleNamespace(**(PLAIN | fields))


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}])
def test_nothing_said_is_nothing_asked(extra_args):
    assert RequestFields.read(extra_args) == RequestFields()


@pytest.mark.parametrize("write", [lambda said: said, json.dumps], ids=["object", "text"])
def test_an_object_and_its_json_text_ask_for_the_same(write):
    said = {"method": "tree", "budget": 24, "min_p": 0.1, "logit_bias": {"42": -1.5}}
    asked = RequestFields.read({"ddtree": write(said)})
    assert asked == RequestFields({"method": "tree", "budget": 24}, 0.1, {42: -1.5})


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"method": "fast"}, "method"),
        ({"budget": -1}, "budget"),
        ({"budget": True}, "budget"),
        ({"depth": 0}, "depth"),
        ({"depht": 3}, "depth"),
        ({"min_p": 2}, "min_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ([], "object"),
        (3, "object"),
        ("{", "object"),
    ],
)
def test_what_is_wrong_is_named(said, named):
    with pytest.raises(ConfigError, match=named):
        RequestFields.read({"ddtree": said})


def test_a_text_is_parsed_once():
    first, second = (RequestFields.read({"ddtree": '{"depth": 7, "min_p": 0.25}'}) for _ in range(2))
    assert first is second


def test_sampling_is_this_packages():
    asked = RequestFields({}, 0.05, {3: 2.0})
    drawn = sampling_params(
        params(
            temperature=0.7, top_k=-1, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, seed=-1,
            min_tokens=2, _bad_words_token_ids=[[5, 6]],
        ),
        asked,
    )  # fmt: skip
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.7, 0, 0.9, 0.05)
    assert (drawn.repetition_penalty, drawn.presence_penalty, drawn.min_tokens) == (1.1, 0.5, 2)
    assert (drawn.logit_bias, drawn.bad_words, drawn.seed) == ({3: 2.0}, ((5, 6),), -1 % MAX_SEED)


def test_a_request_without_an_end_has_the_longest():
    assert sampling_params(params(max_tokens=None), RequestFields()).max_tokens > 10**9


def test_what_cannot_be_kept_exact_is_the_requests_error():
    with pytest.raises(ConfigError, match="presence_penalty"):
        sampling_params(params(presence_penalty=5.0), RequestFields())


def test_fields_that_trees_do_not_know_are_named_unless_they_ask_for_nothing():
    assert refused_field(params(temperature=1.0, seed=3)) is None
    assert refused_field(params(watermarking=False, allowed_token_ids=[])) is None
    name, message = refused_field(params(structured_outputs=object()))
    assert name == "structured_outputs" and "grammar" in message
    name, message = refused_field(params(allowed_token_ids=[1]))
    assert name == "allowed_token_ids" and "logit_bias" in message
    for name in REFUSED_FIELDS:
        assert refused_field(params(**{name: 1}))[0] == name
    assert refused_field(params(thinking_token_budget=0))[0] == "thinking_token_budget"


def test_token_ids_that_the_model_lacks_are_left_out():
    drawn = sampling_params(
        params(_bad_words_token_ids=[[5], [3, 64]]), RequestFields({}, 0.0, {63: 1.0, 64: 2.0})
    )
    kept = within_vocabulary(drawn, 64)
    assert kept.logit_bias == {63: 1.0} and kept.bad_words == ((5,),)


def test_text_nested_too_deeply_is_the_requests_error():
    with pytest.raises(ConfigError, match="object"):
        RequestFields.read({"ddtree": "[" * 100_000})
