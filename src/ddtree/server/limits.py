"""How much a server takes on, and what it says when that is too much."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ddtree.errors import ConfigError, DDTreeError


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Attributes:
        max_waiting: answers that may wait beside those that the engine's rows hold.
        max_body_bytes: longest request body.
        max_tokens: tokens of an answer that names no limit of its own.
        max_n: most answers to one request.
        max_connections: most connections at once.
        request_timeout: seconds from submission after which an answer is ended; 0 for no limit.

    Raises:
        ConfigError: a field is out of range.
    """

    max_waiting: int = 64
    max_body_bytes: int = 4 * 1024 * 1024
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


class BusyError(DDTreeError):
    """The queue is full; HTTP's 429.

    Attributes:
        retry_after: whole seconds after which there may be room, as far as that can be told.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosingError(DDTreeError):
    """The server is shutting down, or its engine could not be restored; HTTP's 503."""


class TimeoutReached(DDTreeError):
    """An answer took longer than `Limits.request_timeout`."""


class EngineError(DDTreeError):
    """The engine failed and ended every answer that it was making; HTTP's 500."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the engine failed ({cause}): send the request again")
