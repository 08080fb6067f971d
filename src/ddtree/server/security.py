"""Who may ask, under which name of the server, and how much they may send. Checked before a body is parsed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree.server.http import ApiError

OPEN = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json"})
"""Paths that need no key; besides, the files of the dashboard's page."""
OPEN_FOLDER = "/dashboard/"
BODY_PATIENCE = 30.0
"""Seconds without a word of a body that has not ended."""
BODY_TIME = 300.0
"""Seconds that a body may take as a whole."""
_LINGER = 2.0
_DISCARDED = 16
_CLOSE = {"Connection": "close"}


class Gate:
    """Middleware that lets a request through, or answers it itself.

    Args:
        app: what comes behind.
        keys: API keys; every path but the open ones needs one of them, unless there are none.
        hosts: names that the request's Host may be; None for any. Against pages of other sites whose name has been
            made to lead here.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], hosts: Iterable[str] | None) -> None:
        self._app = app
        self._keys = [_digest(key) for key in keys]
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(scope)
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            return ApiError(
                421, "this server does not go by that name: see --allowed-host", code="unknown_host"
            )
        path = scope["path"]
        if self._keys and path not in OPEN and not path.startswith(OPEN_FOLDER):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._known(key.strip()):
                return ApiError(
                    401,
                    "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # Pages of other sites may send any other type without asking the server first.
        if scope["method"] == "POST" and not re.fullmatch(r"application/(\S+\+)?json", kind):
            return ApiError(
                415, "send JSON, as Content-Type: application/json", code="unsupported_media_type"
            )
        return None

    def _known(self, key: str) -> bool:
        """Whether it is one of the keys, in a time that does not tell how nearly."""
        digest, known = _digest(key), False
        for one in self._keys:
            known |= hmac.compare_digest(one, digest)
        return known


class BodyLimit:
    """Middleware that stops reading a body once it is longer than `limit` bytes, or takes too long to come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._limit:
            await self._discard(receive)
            await self._error().response()(scope, receive, send)
            return
        seen, whole = 0, False
        until = asyncio.get_running_loop().time() + BODY_TIME

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()
            try:
                patience = min(until, asyncio.get_running_loop().time() + BODY_PATIENCE)
                async with asyncio.timeout_at(patience):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, "the body did not come in time", code="request_timeout", headers=_CLOSE
                ) from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body")
            if seen > self._limit:
                if not whole:
                    await self._discard(receive)
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            413, f"the body is longer than {self._limit} bytes, the most allowed", code="request_too_large"
        )

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while: a client that is still writing would not see the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                left = _DISCARDED * self._limit
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body"):
                        return


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _host(header: str) -> str:
    """The name out of a Host header: without port, and without the brackets of an IPv6 address."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]
