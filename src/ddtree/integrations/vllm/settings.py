"""How the engine's worker drafts, and what requests may ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ddtree.engine.planner import check_drafting
from ddtree.errors import ConfigError
from ddtree.policy import AutoBudget, AutoMethod
from ddtree.tree import MAX_BUDGET, MAX_DEPTH
from ddtree.validation import check_whole, did_you_mean

KEY = "ddtree"
"""Where the settings lie in the engine's `additional_config`, and a request's own in `SamplingParams.extra_args`."""
WORKER = "ddtree.integrations.vllm.worker.TreeWorker"
"""The engine's `worker_cls`."""
PROPOSER = "ddtree.integrations.vllm.proposer.TreeProposer"
"""The engine's `speculative_config["model"]`."""
ADMISSION = "ddtree.integrations.vllm.admission:Admission"
"""Among the engine's `logits_processors`: it checks requests in the front end."""

SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "bad_words",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "max_tokens",
        "n",
        "logprobs",
        "prompt_logprobs",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "skip_clone",
        "skip_reading_prefix_cache",
        "stream_interval",
        "output_text_buffer_length",
        "extra_args",
    }
)
"""Fields of vLLM's `SamplingParams` that a request may set; any other must be left at its default."""


@dataclass(frozen=True)
class Drafting:
    """How one request is drafted for; none of it changes the text.

    Attributes:
        method: "off", "chain" (a single path), "tree", or "auto" (whichever is fastest here).
        budget: most drafted nodes of a step, or "auto": as many as pay.
        depth: how far ahead to draft.

    Raises:
        ConfigError: a field is out of range.
    """

    method: AutoMethod = "auto"
    budget: AutoBudget = "auto"
    depth: int = MAX_DEPTH

    def __post_init__(self) -> None:
        if self.budget != "auto":
            check_whole("budget", self.budget)
        check_whole("depth", self.depth)
        check_drafting(self.method, self.budget, self.depth)

    def merged(self, overrides: Any) -> Drafting:
        """With a request's own fields in place of these. Raises ConfigError for what is unknown or out of range."""
        return replace(self, **_known(overrides, Drafting))


@dataclass(frozen=True)
class Settings:
    """How the worker drafts; what `additional_config["ddtree"]` of the engine holds.

    Attributes:
        drafter: a name as `ddtree serve --drafter` takes, or several.
        drafting: of requests that say nothing.
        nodes: most drafted nodes of any request in a step, which the engine reserves room for: its
            `num_speculative_tokens`.
        feature_bytes: memory for the features of prompts whose keys and values the engine's prefix cache may hold.

    Raises:
        ConfigError: a field is out of range.
    """

    drafter: str | tuple[str, ...] = "lookup"
    drafting: Drafting = field(default_factory=Drafting)
    nodes: int = 32
    feature_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        names = (self.drafter,) if isinstance(self.drafter, str) else self.drafter
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"drafter={self.drafter!r} must be a drafter's name, or several")
        for name, value, low, high in (
            ("nodes", self.nodes, 1, MAX_BUDGET),
            ("feature_bytes", self.feature_bytes, 0, 2**63),
        ):
            check_whole(name, value)
            if not low <= value <= high:
                raise ConfigError(f"{name}={value} is outside {low}..{high}")

    @property
    def named(self) -> str | list[str]:
        """The drafter as `ddtree.drafters.loading.load_drafter` takes it."""
        return self.drafter if isinstance(self.drafter, str) else list(self.drafter)

    @staticmethod
    def from_dict(values: Any) -> Settings:
        """The settings that plain JSON values stand for. Raises ConfigError for what is unknown or out of range."""
        known = _known(values, Settings)
        known["drafting"] = Drafting().merged(known.get("drafting"))
        if isinstance(known.get("drafter"), list):
            known["drafter"] = tuple(known["drafter"])
        return Settings(**known)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    def engine_arguments(self) -> dict[str, Any]:
        """What vLLM's `LLM` or `AsyncEngineArgs` must be given beside the model."""
        return {
            "worker_cls": WORKER,
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": self.nodes,
            },
            "additional_config": {KEY: self.as_dict()},
            "logits_processors": [ADMISSION],
            "async_scheduling": False,
        }


def _known(values: Any, kind: type) -> dict[str, Any]:
    if values is None:
        return {}
    names = [own.name for own in fields(kind)]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{KEY} must be an object of {', '.join(names)}, not {values!r}")
    for name in values:
        if name not in names:
            raise ConfigError(f"unknown field {name!r} of {KEY}: {did_you_mean(name, names)}")
    return dict(values)
