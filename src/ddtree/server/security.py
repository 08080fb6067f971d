"""Who may call the server, and how much a client may send: checked before a body is parsed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ddtree.server.http import ApiError

OPEN_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json"}
)
"""Paths that need no key; the dashboard's files need none either."""
OPEN_FOLDER = "/dashboard/"
HEAD_PATIENCE = 30.0
"""Seconds that the head of a request may take."""
BODY_PATIENCE = 30.0
"""Longest pause within a body, in seconds."""
BODY_TIME = 300.0
"""Seconds that a whole body may take."""
_LINGER = 2.0  # seconds for which a body that is too long is read on
_DISCARDED = 16  # most of such a body that is read, in limits


class AuthMiddleware:
    """Lets a request through, or answers it with 401, 415 or 421.

    Args:
        app: the application behind it.
        keys: API keys. Every path but the open ones needs one of them, unless there are none.
        hosts: names allowed in the Host header; None for any. This keeps out pages of other sites whose name was made
            to lead to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], hosts: Iterable[str] | None) -> None:
        self._app = app
        self._keys = [_digest(key) for key in keys]
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            message = "this server does not go by that name: see --allowed-host"
            return ApiError(421, message, code="unknown_host")
        needs_key = self._keys and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER)
        if needs_key and not self._authorized(headers.get("authorization", "")):
            return ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # Pages of other sites may send any other type without asking the server first.
        if scope["method"] == "POST" and not re.fullmatch(r"application/(\S+\+)?json", kind):
            message = "send JSON, as Content-Type: application/json"
            return ApiError(415, message, code="unsupported_media_type")
        return None

    def _authorized(self, header: str) -> bool:
        """Return whether a header holds one of the keys, in a time that does not depend on how nearly."""
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(known, digest) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Reads a request's body before the application does, and refuses one that is too long or too slow.

    Args:
        app: the application behind it.
        limit: most bytes of a body, as 4 MiB.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope).get("content-length", ""), receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replayed, send)

    async def _read(self, length: str, receive: Receive) -> bytes:
        parts: list[bytes] = []
        announced = int(length[:20]) if length.isdigit() else 0
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_TIME):
                while more and max(size, announced) <= self._limit:
                    async with asyncio.timeout(BODY_PATIENCE):
                        part = await receive()
                    if part["type"] == "http.disconnect":
                        raise ApiError(400, "the client left before its body was complete")
                    parts.append(part.get("body", b""))
                    size += len(parts[-1])
                    more = part.get("more_body", False)
        except TimeoutError as error:
            close = {"Connection": "close"}
            message = "the body did not come in time"
            raise ApiError(408, message, code="request_timeout", headers=close) from error
        if max(size, announced) > self._limit:
            if more:
                await self._discard(receive)
            message = f"the body is longer than {self._limit} bytes, the most allowed"
            raise ApiError(413, message, code="request_too_large")
        return b"".join(parts)

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while: a client that is still writing would not see the response."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                left = _DISCARDED * self._limit
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body"):
                        return


class LimitedConnection(H11Protocol):
    """uvicorn's connection, with a limit on their number (`limit_concurrency`) and on the time of a request's head.

    uvicorn's own limit is checked at each request, and answers those of older connections in plain text. Here one
    connection too many gets an error in OpenAI's form and is closed. uvicorn's own timer only runs between requests.
    """

    _head_deadline: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, or close a connection too many."""
        super().connection_made(transport)
        most, self.limit_concurrency = self.limit_concurrency, None
        if most is not None and len(self.connections) > most:
            transport.write(_too_many_connections())
            transport.close()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request. A head must be complete in time, however many pieces it comes in."""
        super().data_received(data)
        if self._answering:
            self._head_deadline = None
        else:
            self._wait_for_head()

    def shutdown(self) -> None:
        """End with the server. A request whose body is incomplete would only be refused, at its sender's pace."""
        if self._answering and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()

    def _should_upgrade(self) -> bool:
        # Such requests are answered over HTTP; uvicorn would log the advice to install another protocol.
        return False

    @property
    def _answering(self) -> bool:
        # None before the first request, whatever its type says.
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.time() + HEAD_PATIENCE
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_at(self._head_deadline, self.timeout_keep_alive_handler)


def _too_many_connections() -> bytes:
    error = ApiError(503, "too many connections: try again later", code="too_many_connections")
    response = error.response()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(response.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + bytes(response.body)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _host(header: str) -> str:
    """Return the name in a Host header, without port and without the brackets of an IPv6 address."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]
