"""From a request's fields to `SamplingParams`: defaults, names that differ, bounds that only a server needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddtree.engine.detokenizer import bad_word_ids
from ddtree.sampling.noise import MAX_SEED
from ddtree.sampling.params import MAX_TOKEN, SamplingParams
from ddtree.server.http import ApiError
from ddtree.server.schemas import Generation

MAX_LOGPROBS = 20
_MODELS_OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAME_NAME = (
    *_MODELS_OWN, "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "stop_token_ids", "stop",
    "ignore_eos", "skip_special_tokens",
)  # fmt: skip
# Each of these costs time at every token.
_MOST = {"stop": 64, "bad_words": 64, "stop_token_ids": 1024}
_LONGEST = 1024
"""Characters of a stop string or bad word."""


def sampling_defaults(model: Any) -> dict[str, Any]:
    """The sampling that a model's own generation_config.json asks for, as far as it says anything.

    Args:
        model: a transformers model.
    """
    config = getattr(model, "generation_config", None)
    said = config.to_diff_dict() if config is not None else {}
    return {name: said[name] for name in _MODELS_OWN if said.get(name) is not None}


def sampling_params(
    request: Generation,
    defaults: dict[str, Any],
    tokenizer: Any,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    prompt_only: bool = False,
) -> SamplingParams:
    """How to sample the first of a request's answers; see `choices` for the others.

    Args:
        request: null or absent fields take `defaults`, then those of `SamplingParams`.
        defaults: see `sampling_defaults`.
        tokenizer: for strings that become token ids; may be None.
        max_tokens: where the request has none.
        logprobs: most likely tokens to report beside each; None for no log-probabilities.
        prompt_logprobs: the same of the prompt's tokens.
        prompt_only: no tokens may be asked for; one is made all the same.

    Raises:
        ConfigError: a value is out of range; the message names the field.
        ApiError: there is too much of something.
    """
    asked = asked_tokens(request, least=0 if prompt_only else 1)
    fields = dict(defaults)
    for name, most in _MOST.items():
        value = getattr(request, name)
        entries = value if isinstance(value, list) else [value]
        if len(entries) > most:
            raise _invalid(name, f"{name} has {len(entries)} entries: at most {most}")
        longest = max((len(entry) for entry in entries if isinstance(entry, str)), default=0)
        if longest > _LONGEST:
            raise _invalid(name, f"{name} holds {longest} characters in one string: at most {_LONGEST}")
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.include_stop_str_in_output is not None:
        fields["include_stop"] = request.include_stop_str_in_output
    if request.bad_words:
        if tokenizer is None:
            raise ApiError(400, "bad_words needs a tokenizer, which this model lacks", param="bad_words")
        fields["bad_words"] = bad_word_ids(tokenizer, request.bad_words)
    if request.stop and tokenizer is None:
        raise ApiError(
            400, "stop needs a tokenizer, which this model lacks: use stop_token_ids", param="stop"
        )
    if request.seed is not None:
        # Clients send any 64-bit number.
        fields["seed"] = request.seed % MAX_SEED
    return SamplingParams(
        max_tokens=max_tokens if asked is None else max(1, asked),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **fields,
    )


def asked_tokens(request: Generation, least: int = 1) -> int | None:
    """Most tokens that a request asks for, by either name; None where it says nothing, ApiError below `least`."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(request, name)
    if asked is not None and not least <= asked <= MAX_TOKEN:
        raise _invalid(name, f"{name} must be from {least} to {MAX_TOKEN}, not {asked}")
    return asked


def choices(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Parameters of n answers to one prompt: the first has the seed given, the others those after it."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=(params.seed + i) % MAX_SEED) for i in range(n)]


def checked_count(n: int | None, most: int) -> int:
    """How many answers, or ApiError."""
    if n is not None and not 1 <= n <= most:
        raise _invalid("n", f"n must be from 1 to {most}, not {n}")
    return n or 1


def checked_logprobs(count: int, name: str) -> int:
    """How many likely tokens to tell of beside each token, or ApiError."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise _invalid(name, f"{name} must be from 0 to {MAX_LOGPROBS}, not {count}")
    return count


def _invalid(name: str, message: str) -> ApiError:
    return ApiError(400, message, param=name, code="invalid_value")
