"""Connections that cannot use the server up: there are only so many, and each must send its request in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ddtree.server.http import ApiError, dumps

HEAD_PATIENCE = 30.0
"""Seconds that the head of a request may take to come."""


class Connection(H11Protocol):
    """uvicorn's connection, with a bound on their number (`limit_concurrency` of its settings) and on heads' time.

    One too many is told so, in OpenAI's form, and closed.
    """

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn would look at it again with every request, and answer those of others in plain text.
        most, self.limit_concurrency = self.limit_concurrency, None
        if most is not None and len(self.connections) > most:
            transport.write(_too_many())
            transport.close()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._stop_waiting()
        elif self._head is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        # A request that has not come whole would only be refused, and may take as long as its sender likes.
        if self._answering and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()

    def _should_upgrade(self) -> bool:
        # Such requests are answered as if they asked for no other protocol; uvicorn would advise to install one.
        return False

    @property
    def _answering(self) -> bool:
        # None before the first request, whatever its type says.
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head = self.loop.call_later(HEAD_PATIENCE, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _give_up(self) -> None:
        self._head = None
        if not self._answering:
            self.transport.close()


def _too_many() -> bytes:
    error = ApiError(503, "too many connections: try again later", code="too_many_connections")
    body = dumps(error.body()).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
