"""Settings of the plugin: how the worker drafts, and what requests may ask of it. Needs no vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from ddtree.engine.planner import check_drafting
from ddtree.errors import ConfigError, check_whole, did_you_mean
from ddtree.policy import AutoBudget, AutoMethod
from ddtree.sampling.noise import MAX_SEED
from ddtree.sampling.params import MAX_TOKEN, SamplingParams
from ddtree.tree import MAX_BUDGET, MAX_DEPTH

KEY = "ddtree"
"""Name of the settings in the engine's `additional_config`, and of a request's own in `SamplingParams.extra_args`."""
WORKER = "ddtree.integrations.vllm.model_runner.TreeWorker"
"""The engine's `worker_cls`."""
PROPOSER = "ddtree.integrations.vllm.model_runner.TreeProposer"
"""The engine's `speculative_config["model"]`."""
ADMISSION = "ddtree.integrations.vllm.frontend:RequestCheck"
"""One of the engine's `logits_processors`: it checks requests in the front end."""
MIDDLEWARE = "ddtree.integrations.vllm.frontend.Middleware"
"""The HTTP server's `--middleware`."""
COUNTERS_METHOD = "ddtree_counters"
"""Name of the worker's method that returns its counters."""
DRAFTING_FAILED = "drafting_failed"
"""Name of the counter that is a state: 1 where drafting has failed."""

MOVED_FIELDS = ("min_p", "logit_bias")
"""Fields that vLLM refuses beside any drafting; they come in `extra_args` and are applied on each path of a tree."""
REFUSED_FIELDS = {
    "structured_outputs": "answers cannot be held to a grammar while trees are drafted: leave it out",
    "allowed_token_ids": "use logit_bias",
} | dict.fromkeys(
    (
        "watermarking", "logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start",
        "thinking_token_budget", "repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids",
    ),
    "leave it out",
)  # fmt: skip
"""Fields of vLLM's `SamplingParams` that cannot be kept exact with trees, or were never tried, and what to do."""
_SAME = (
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class DraftingSettings:
    """How one request is drafted for; none of it changes the text.

    Attributes:
        method: "off", "chain" (a single path), "tree", or "auto" (whichever is fastest here).
        budget: most drafted nodes of a step, e.g. 16, or "auto": as many as pay.
        depth: most tokens to draft ahead, 1..16.

    Raises:
        ConfigError: a field is out of range.
    """

    method: AutoMethod = "auto"
    budget: AutoBudget = "auto"
    depth: int = MAX_DEPTH

    def __post_init__(self) -> None:
        check_drafting(self.method, self.budget, self.depth)

    def merged(self, overrides: Any) -> DraftingSettings:
        """Return a copy with a request's own fields; raise ConfigError for unknown ones or values out of range."""
        return replace(self, **_known(overrides, DraftingSettings))


@dataclass(frozen=True)
class PluginSettings:
    """How the worker drafts; the value of `additional_config["ddtree"]` of the engine.

    Attributes:
        drafter: a name as `ddtree serve --drafter` takes, e.g. "lookup", or several.
        drafting: of requests that say nothing.
        nodes: most drafted nodes of a request in a step, 1..1024, e.g. 32. vLLM reserves room for them: it is its
            `num_speculative_tokens`.
        feature_bytes: memory for features of prompts that vLLM's prefix cache may hold, e.g. 2**28.

    Raises:
        ConfigError: a field is out of range.
    """

    drafter: str | list[str] = "lookup"
    drafting: DraftingSettings = field(default_factory=DraftingSettings)
    nodes: int = 32
    feature_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        names = [self.drafter] if isinstance(self.drafter, str) else self.drafter
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"drafter={self.drafter!r} must be a drafter's name, or several")
        check_whole("nodes", self.nodes, 1, MAX_BUDGET)
        check_whole("feature_bytes", self.feature_bytes, 0)

    @staticmethod
    def from_dict(values: Any) -> PluginSettings:
        """Return the settings of plain JSON values; raise ConfigError for unknown fields or values out of range."""
        known = _known(values, PluginSettings)
        known["drafting"] = DraftingSettings().merged(known.get("drafting"))
        return PluginSettings(**known)

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's `LLM` or `AsyncEngineArgs` beside the model."""
        return {
            "worker_cls": WORKER,
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": self.nodes,
            },
            "additional_config": {KEY: asdict(self)},
            "logits_processors": [ADMISSION],
            "async_scheduling": False,
        }


@dataclass(frozen=True)
class RequestFields:
    """Contents of `extra_args["ddtree"]` of a request.

    Attributes:
        drafting: fields of `DraftingSettings` that the request sets for itself.
        min_p: as in `ddtree.SamplingParams`.
        logit_bias: token id to the number that is added to its logit.
    """

    drafting: dict[str, Any] = field(default_factory=dict)
    min_p: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def read(extra_args: Mapping[str, Any] | None) -> RequestFields:
        """Read a request's own fields: an object, or its JSON text, since HTTP requests have room for text alone.

        Raises:
            ConfigError: it is no object, or a field is unknown or out of range.
        """
        given = (extra_args or {}).get(KEY)
        return _parsed(given) if isinstance(given, str) else _read(given)


# A request comes by here in the middleware and in the check of requests, which share a process.
@lru_cache(maxsize=256)
def _parsed(text: str) -> RequestFields:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY} must be an object, or one written as JSON, not {text!r}") from error
    return _read(given)


def _read(given: Any) -> RequestFields:
    drafting = _known(given, DraftingSettings, MOVED_FIELDS)
    moved = {name: drafting.pop(name) for name in MOVED_FIELDS if name in drafting}
    params = SamplingParams(**{name: value for name, value in moved.items() if value is not None})
    DraftingSettings(**drafting)
    return RequestFields(drafting, params.min_p, params.logit_bias)


def sampling_params(params: Any, fields: RequestFields) -> SamplingParams:
    """Return this package's parameters for a request.

    Args:
        params: vLLM's `SamplingParams`.
        fields: the request's own.

    Raises:
        ConfigError: a value is out of the range that can be kept exact; the message names the field.
    """
    return SamplingParams(
        **{name: getattr(params, name) for name in _SAME},
        min_p=fields.min_p,
        logit_bias=fields.logit_bias,
        bad_words=tuple(map(tuple, params._bad_words_token_ids or ())),
        max_tokens=MAX_TOKEN if params.max_tokens is None else params.max_tokens,
        # Clients send any 64-bit number.
        seed=None if params.seed is None else params.seed % MAX_SEED,
    )


def refused_field(params: Any) -> tuple[str, str] | None:
    """Return the first of `REFUSED_FIELDS` that a request sets, with a message; None where it sets none.

    Args:
        params: vLLM's `SamplingParams`.
    """
    for name, advice in REFUSED_FIELDS.items():
        value = getattr(params, name)
        # Only a thinking budget of 0 asks for something.
        if value is not None and (value or name == "thinking_token_budget"):
            return name, f"{name} is not supported with draft trees: {advice}"
    return None


def _known(values: Any, kind: type, more: Sequence[str] = ()) -> dict[str, Any]:
    if values is None:
        return {}
    names = [*(own.name for own in fields(kind)), *more]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{KEY} must be an object of {', '.join(names)}, not {values!r}")
    for name in values:
        if name not in names:
            raise ConfigError(f"unknown field {name!r} of {KEY}: {did_you_mean(name, names)}")
    return dict(values)
