"""How answers are drafted for: the server's setting, and what a request may change of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ddtree.errors import ConfigError
from ddtree.policy import AutoBudget, AutoMethod
from ddtree.tree import MAX_BUDGET, MAX_DEPTH
from ddtree.validation import did_you_mean

METHODS: tuple[AutoMethod, ...] = ("off", "chain", "tree", "auto")


@dataclass(frozen=True)
class Drafting:
    """No setting changes the text, and each takes effect between two rounds.

    Attributes:
        method: "off" (autoregressive), "chain", "tree", or "auto" (whichever is fastest).
        depth: how far ahead to draft, 1 to 16.
        budget: most drafted nodes of a round, 0 to 1024, or "auto": as many as pay.
        drafter: name of the one drafter to use; None for all that are loaded.

    Raises:
        ConfigError: a field has a wrong type or is out of range; the message names it.
    """

    method: AutoMethod = "auto"
    depth: int = MAX_DEPTH
    budget: AutoBudget = "auto"
    drafter: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ConfigError(f"method={self.method!r} is unknown: choose {', '.join(METHODS)}")
        if not _whole(self.depth) or not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"depth={self.depth!r} must be a whole number from 1 to {MAX_DEPTH}")
        if self.budget != "auto" and not (
            isinstance(self.budget, int) and _whole(self.budget) and 0 <= self.budget <= MAX_BUDGET
        ):
            raise ConfigError(
                f"budget={self.budget!r} must be a whole number from 0 to {MAX_BUDGET}, or auto"
            )
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise ConfigError(f"drafter={self.drafter!r} must be the name of a drafter, or null for all")

    def merged(self, overrides: Mapping[str, Any] | None) -> Drafting:
        """This setting with some fields replaced.

        Raises:
            ConfigError: a field is unknown or its value out of range.
        """
        if overrides is None:
            return self
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"drafting must be an object of {', '.join(_FIELDS)}, not {overrides!r}")
        for name in overrides:
            if name not in _FIELDS:
                raise ConfigError(f"unknown drafting field {name!r}: {did_you_mean(name, _FIELDS)}")
        return replace(self, **overrides)

    def check_drafter(self, loaded: Sequence[str]) -> None:
        """Raise ConfigError when it names a drafter that is not among those loaded."""
        if self.drafter is not None and self.drafter not in loaded:
            known = ", ".join(loaded) or "none"
            raise ConfigError(f"drafter={self.drafter!r} is not loaded: loaded are {known}")

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


_FIELDS = tuple(field.name for field in fields(Drafting))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
