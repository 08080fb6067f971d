"""What the policy's controllers do, told to those who are not the engine's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.policy import Policy

_EVERY = 0.5  # seconds between two looks
_KEY = ("method", "budget", "members", "depth", "sampled", "rows")
_SHOWN = 32  # kinds of request, and switches, that are told


class Controllers:
    """The last look at a policy.

    Args:
        switched: called with both names at each change of arm.
        now: a clock in seconds.

    Attributes:
        groups: of each kind of request and load: what its controller knows, its arm, and the last reason to change.
        switches: the last ones, with Unix time, load and reason.
    """

    def __init__(
        self, switched: Callable[[str, str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self.groups: list[dict[str, Any]] = []
        self.switches: tuple[dict[str, Any], ...] = ()
        self._switched = switched
        self._now = now
        self._looked = float("-inf")
        self._seen: dict[tuple[Any, ...], int] = {}
        self._last: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=_SHOWN)

    def look(self, policy: Policy | None, at_once: bool = False) -> None:
        """Take over what has changed, twice a second at most; from the engine's thread, between steps."""
        if policy is None or (not at_once and self._now() - self._looked < _EVERY):
            return
        self._looked = self._now()
        groups = policy.state()["groups"]
        for group in groups:
            key = tuple(str(group[name]) for name in _KEY)
            for switch in group["switches"]:
                if switch["round"] > self._seen.get(key, 0):
                    self._seen[key] = switch["round"]
                    self._last[key] = {**switch, "load": group["rows"], "at": time.time()}
                    self._recent.append(self._last[key])
                    self._switched(switch["before"], switch["after"])
            last = self._last.get(key, {})
            group["load"] = group.pop("rows")
            group["reason"], group["at"] = last.get("reason", "first choice"), last.get("at")
        self.groups, self.switches = groups[-_SHOWN:], tuple(self._recent)
