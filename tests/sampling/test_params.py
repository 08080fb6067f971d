"""SamplingParams: what is accepted, what is normalised, and what each refusal says."""

import math
from typing import Any

import pytest

from ddtree.errors import ConfigError
from ddtree.sampling.params import SamplingParams, check_vocabulary

REFUSED = [
    ("temperature", (-0.1, math.nan, 10**400, 1e9), "temperature must be from 0 to 100, not "),
    ("temperature", ("hot", None), "temperature must be a number from 0 to 100, not "),
    ("top_k", (-2, 2**40), "top_k must be from -1 to"),
    ("top_k", (1.5, True), "top_k must be an integer"),
    ("top_p", (1.01, -0.1, math.nan), "top_p must be from 0 to 1"),
    ("min_p", (2,), "min_p must be from 0 to 1"),
    ("repetition_penalty", (0, math.inf), "repetition_penalty must be from 0.001 to 1000"),
    ("presence_penalty", (2.5,), "presence_penalty must be from -2 to 2"),
    ("frequency_penalty", (-2.5,), "frequency_penalty must be from -2 to 2"),
    ("logit_bias", ([1, 2],), "logit_bias must map token ids to numbers"),
    ("logit_bias", ({"x": 1},), "a token id in logit_bias must be an integer"),
    ("logit_bias", ({-1: 1},), "a token id in logit_bias must be from 0"),
    ("logit_bias", ({1: 101}, {1: math.nan}), "logit_bias of token 1 must be from -100 to 100"),
    ("logit_bias", ({1: 1, "1": 2},), "logit_bias names token 1 twice"),
    ("bad_words", (["no"],), "bad_words takes token ids, not 'no'"),
    ("bad_words", ("no",), "bad_words must be a list of token id lists"),
    ("bad_words", ([[]],), "bad_words contains an empty list"),
    ("bad_words", ([[-1]],), "a token id in bad_words must be from 0"),
    ("bad_words", ([3],), "bad_words must be a list of token ids"),
    ("min_tokens", (-1,), "min_tokens must be from 0"),
    ("min_tokens", (300,), r"min_tokens \(300\) is more than max_tokens \(256\)"),
    ("stop_token_ids", (5,), "stop_token_ids must be a list of token ids"),
    ("stop_token_ids", ([2**31],), "a token id in stop_token_ids must be from 0"),
    ("stop", ([""], ""), "stop contains an empty string"),
    ("stop", ([1],), "stop must be a string or a list of strings"),
    ("stop", (5,), "stop must be a list of strings"),
    ("max_tokens", (0, 2**31), "max_tokens must be from 1"),
    ("max_tokens", (None,), "max_tokens must be an integer"),
    ("seed", (-2, 2**63), "seed must be from -1 to 9223372036854775807"),
    ("seed", (1.0,), "seed must be an integer"),
    ("logprobs", (-1, 5000), "logprobs must be from 0 to 1000"),
    ("logprobs", (True,), "logprobs must be an integer"),
    ("ignore_eos", (1,), "ignore_eos must be true or false"),
    ("include_stop", ("yes",), "include_stop must be true or false"),
    ("skip_special_tokens", (None,), "skip_special_tokens must be true or false"),
    ("processors", ([3],), "processors must be functions"),
    ("processors", (abs,), "processors must be a list of functions"),
]


@pytest.mark.parametrize(("field", "values", "message"), REFUSED)
def test_a_bad_value_is_refused_by_name(field: str, values: tuple[Any, ...], message: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=message) as caught:
            SamplingParams(**{field: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        *((name, None, ()) for name in ("stop", "bad_words", "stop_token_ids", "processors")),
        *((name, None, None) for name in ("seed", "logprobs", "prompt_logprobs")),
        ("seed", -1, None),
        ("top_k", None, 0),
        ("logit_bias", None, {}),
    ],
)
def test_a_value_is_kept_in_one_form(field: str, value: Any, kept: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == kept


def test_what_json_clients_send_is_understood() -> None:
    params = SamplingParams(
        logit_bias={"42": -100, 7: 1},  # type: ignore[dict-item]
        temperature=1,
        top_k=-1,
        bad_words=[[1, 2]],  # type: ignore[arg-type]
        stop_token_ids=[3],  # type: ignore[arg-type]
    )
    assert params.logit_bias == {42: -100.0, 7: 1.0}
    assert isinstance(params.temperature, float)
    assert params.top_k == 0
    assert params.bad_words == ((1, 2),)
    assert params.stop_token_ids == (3,)


def test_the_caller_s_dictionary_is_not_kept() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 5.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-6, True), (9e-6, True), (1e-5, False), (1, False)]
)
def test_a_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_a_missing_seed_is_drawn_fresh_and_a_given_one_kept() -> None:
    drawn = {SamplingParams().with_seed().seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(seed is not None and 0 <= seed < 2**63 for seed in drawn)
    assert SamplingParams(seed=0).with_seed().seed == 0
    assert SamplingParams(seed=2**63 - 1).with_seed().seed == 2**63 - 1


@pytest.mark.parametrize(
    ("fields", "processed"),
    [
        ({}, False),
        ({"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"logit_bias": {1: 1}}, True),
        ({"bad_words": [[1]]}, True),
        ({"min_tokens": 1}, True),
        ({"processors": [lambda prefix, logits: logits]}, True),
    ],
)
def test_processed_tells_whether_logits_change(fields: dict[str, Any], processed: bool) -> None:
    assert SamplingParams(**fields).processed is processed


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {100: 1}), ("stop_token_ids", [100]), ("bad_words", [[1, 100]])]
)
def test_a_token_beyond_the_vocabulary_is_refused_by_name(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    check_vocabulary(params, 101)
    with pytest.raises(ConfigError, match=f"{field} names token 100, but the model's ids end at 99"):
        check_vocabulary(params, 100)
