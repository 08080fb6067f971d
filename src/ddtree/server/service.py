"""The one thread that decodes, and what the rest of a server says to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.api import Model
from ddtree.sampling import SamplingParams
from ddtree.server.drafting import Drafting
from ddtree.server.events import Event
from ddtree.server.limits import Limits


@dataclass(frozen=True)
class Asked:
    """One answer to be made: `submit`'s arguments.

    Attributes:
        prompt: token ids.
        params: how to sample.
        deliver: called with each event, from the engine's thread; must not block.
        drafting: fields of `Drafting` that this answer fixes; the others follow the server's setting, live.
        text: make text of the tokens; False leaves `Event.text` empty.
    """

    prompt: list[int]
    params: SamplingParams
    deliver: Callable[[Event], None]
    drafting: Mapping[str, Any] | None = None
    text: bool = True


class Ticket:
    """An answer that was admitted; what `cancel` takes."""


class Service:
    """Owns a thread that runs the engine while there is work and sleeps otherwise. All methods may be called from any
    thread, and none waits for a round, except `shutdown`.
    """

    def __init__(
        self,
        model: Model,
        *,
        name: str,
        drafting: Drafting | None = None,
        limits: Limits | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def drafting(self) -> Drafting:
        raise NotImplementedError

    @property
    def health(self) -> dict[str, Any]:
        """{"live": bool, "ready": bool, "status": "starting" | "ready" | "closing" | "stopped" | "failed",
        "error": str | None}"""
        raise NotImplementedError

    def set_drafting(self, drafting: Drafting) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def wait_ready(self, timeout: float | None = None) -> bool:
        raise NotImplementedError

    def shutdown(self, grace: float = 30.0) -> None:
        raise NotImplementedError

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        drafting: Mapping[str, Any] | None = None,
        text: bool = True,
    ) -> Ticket:
        raise NotImplementedError

    def submit_all(self, asked: Sequence[Asked]) -> list[Ticket]:
        raise NotImplementedError

    def cancel(self, ticket: Ticket) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def watch(self, deliver: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        raise NotImplementedError
