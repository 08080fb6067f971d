"""What a request to vLLM asks of drafting and sampling. Needs no vLLM: a request is anything with its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddtree.errors import ConfigError
from ddtree.integrations.vllm.settings import KEY, SAMPLING, Drafting
from ddtree.sampling.noise import MAX_SEED
from ddtree.sampling.params import MAX_TOKEN, SamplingParams

SAMPLED_HERE = ("min_p", "logit_bias")
"""Fields that vLLM refuses beside any drafting; they come in `extra_args` and are applied on each path of a tree."""
# A 0 may ask for something: `thinking_token_budget` does.
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_INSTEAD = {
    "structured_outputs": "answers cannot be held to a grammar while trees are drafted: leave it out",
    "allowed_token_ids": "use logit_bias",
}


@dataclass(frozen=True)
class Asked:
    """What `extra_args` of a request hold for the plugin.

    Attributes:
        drafting: fields of `Drafting` that the request sets for itself.
        min_p: as in `ddtree.SamplingParams`.
        logit_bias: token id to what is added to its logit.
    """

    drafting: dict[str, Any] = field(default_factory=dict)
    min_p: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)


def asked(extra_args: Mapping[str, Any] | None) -> Asked:
    """Read `extra_args["ddtree"]`: an object, or as JSON text, since a request's body has room for no more.

    Raises:
        ConfigError: it is no object, or a field is unknown or out of range.
    """
    said = (extra_args or {}).get(KEY)
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{KEY} must be an object, or one written as JSON, not {said!r}") from error
    if said is None:
        return Asked()
    if not isinstance(said, Mapping):
        raise ConfigError(f"{KEY} must be an object, not {said!r}")
    drafting = {name: value for name, value in said.items() if name not in SAMPLED_HERE}
    Drafting().merged(drafting)
    drawn = SamplingParams(min_p=_given(said, "min_p", 0.0), logit_bias=_given(said, "logit_bias", {}))
    return Asked(drafting, drawn.min_p, drawn.logit_bias)


def sampling(params: Any, asked: Asked) -> SamplingParams:
    """How a request is sampled, in this package's terms.

    Args:
        params: vLLM's `SamplingParams`.
        asked: what its `extra_args` hold.

    Raises:
        ConfigError: a value is out of the range that can be kept exactly; the message names the field.
    """
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=asked.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=asked.logit_bias,
        bad_words=tuple(map(tuple, params._bad_words_token_ids or ())),
        min_tokens=params.min_tokens,
        max_tokens=MAX_TOKEN if params.max_tokens is None else params.max_tokens,
        # Clients send any 64-bit number.
        seed=None if params.seed is None else params.seed % MAX_SEED,
    )


def within(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same without token ids that the model lacks.

    They have no effect on a text, the front end cannot tell them all, and an error in the worker would end the engine.
    """
    return replace(
        sampling,
        logit_bias={token: bias for token, bias in sampling.logit_bias.items() if token < vocab_size},
        bad_words=tuple(word for word in sampling.bad_words if max(word) < vocab_size),
    )


def unsupported(params: Any, defaults: Any, names: tuple[str, ...]) -> tuple[str, str] | None:
    """The first field that asks for what drafting cannot keep exact, and what to do; None where there is none.

    Args:
        params: vLLM's `SamplingParams`.
        defaults: the same without anything asked for.
        names: of its fields.
    """
    for name in names:
        if name in SAMPLING or name.startswith("_"):
            continue
        value, usual = getattr(params, name), getattr(defaults, name)
        if any(value is one or (type(value) is type(one) and value == one) for one in (usual, *_NOTHING)):
            continue
        return name, f"{name} is not supported with draft trees: {_INSTEAD.get(name, 'leave it out')}"
    return None


def _given(said: Mapping[str, Any], name: str, usual: Any) -> Any:
    value = said.get(name)
    return usual if value is None else value


def named_in(message: str, names: tuple[str, ...]) -> str | None:
    """The field that an error's message begins with, among its first words."""
    return next((word for word in re.findall(r"\w+", message)[:8] if word in names), None)
