"""Settings of a server: limits, the default way of drafting, and access over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ddtree.errors import ConfigError, did_you_mean, is_whole
from ddtree.policy import AutoBudget, AutoMethod
from ddtree.tree import MAX_BUDGET, MAX_DEPTH

_METHODS = ("off", "chain", "tree", "auto")


@dataclass(frozen=True)
class ServerLimits:
    """Bound the work that a server accepts.

    Attributes:
        max_waiting: answers that may wait for a row, in addition to the engine's rows.
        max_body: longest request body, in bytes.
        max_tokens: tokens of a chat answer whose request names no limit.
        max_n: most answers to one prompt.
        max_connections: most open connections.
        request_timeout: seconds from submission after which an answer is ended; 0 for no limit.

    Raises:
        ConfigError: a field is out of range.
    """

    max_waiting: int = 64
    max_body: int = 4 * 1024 * 1024
    max_tokens: int = 512
    max_n: int = 8
    max_connections: int = 512
    request_timeout: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("max_waiting", "request_timeout") else 1
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise ConfigError(f"{field.name}={value!r} must be {least} or more")


@dataclass(frozen=True)
class DraftSettings:
    """Say how answers are drafted. No setting changes the text, and each takes effect between two rounds.

    Attributes:
        method: "off" (autoregressive), "chain", "tree", or "auto" (whichever is fastest).
        depth: most tokens ahead to draft, 1 to 16.
        budget: most drafted nodes of a round, 0 to 1024 (a typical one is 16), or "auto": as many as pay.
        drafter: name of the one drafter to use; None for all that are loaded.

    Raises:
        ConfigError: a field has a wrong type or is out of range; the message names it.
    """

    method: AutoMethod = "auto"
    depth: int = MAX_DEPTH
    budget: AutoBudget = "auto"
    drafter: str | None = None

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ConfigError(f"method={self.method!r} is unknown: choose {', '.join(_METHODS)}")
        if not is_whole(self.depth) or not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"depth={self.depth!r} must be a whole number from 1 to {MAX_DEPTH}")
        if self.budget != "auto" and not (is_whole(self.budget) and 0 <= self.budget <= MAX_BUDGET):
            raise ConfigError(
                f"budget={self.budget!r} must be a whole number from 0 to {MAX_BUDGET}, or auto"
            )
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise ConfigError(f"drafter={self.drafter!r} must be the name of a drafter, or null for all")

    def merged(self, overrides: Mapping[str, Any] | None) -> DraftSettings:
        """Return these settings with some fields replaced.

        Raises:
            ConfigError: a field is unknown or its value out of range.
        """
        if overrides is None:
            return self
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"drafting must be an object of {', '.join(_DRAFT_FIELDS)}, not {overrides!r}")
        for name in overrides:
            if name not in _DRAFT_FIELDS:
                raise ConfigError(f"unknown drafting field {name!r}: {did_you_mean(name, _DRAFT_FIELDS)}")
        return replace(self, **overrides)

    def check_drafter(self, loaded: Sequence[str]) -> None:
        """Raise ConfigError if the named drafter is not among the loaded ones."""
        if self.drafter is not None and self.drafter not in loaded:
            known = ", ".join(loaded) or "none"
            raise ConfigError(f"drafter={self.drafter!r} is not loaded: loaded are {known}")


_DRAFT_FIELDS = tuple(field.name for field in fields(DraftSettings))


@dataclass(frozen=True)
class HttpSettings:
    """Say who may call the server, and where sampling defaults come from.

    Attributes:
        api_keys: a request must carry one of these as bearer token; empty: none is needed.
        cors_origins: origins whose pages may call the server; none by default.
        hosts: the only host names a request may use for the server, without ports; None for any.
        model_sampling: sampling fields that a request leaves out come from the model's generation_config.json.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    model_sampling: bool = True
