"""HTTP below the routes: keys, lengths of bodies, errors in OpenAI's form, JSON, event streams.

Who may call and how much a client may send is checked before a body is parsed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree.errors import CacheMemoryError, ConfigError, DDTreeError, PromptError
from ddtree.server.handle import BusyError, ClosingError, EngineError, TimeoutReached

STREAM_DONE = "data: [DONE]\n\n"
STREAM_COMMENT = ": waiting\n\n"
STREAM_PATIENCE = 15.0
"""Seconds of silence after which a comment shows that a stream's connection is alive."""
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The description of a route that may stream, for OpenAPI."""
_UNION_BRANCH = re.compile(r"str|int|float|bool|list|dict|(list|dict|union|function-\w+|constrained-\w+)\[.*")
_LONGEST = 1000  # characters of an error message
# Half a surrogate pair, which UTF-8 cannot hold, and what Python and JavaScript take for the end of a line, where an
# event would end.
_ESCAPED = re.compile("[\ud800-\udfff\x85\u2028\u2029]")
# Status, code and default Retry-After seconds of errors that are not the request's fault.
_SERVER_ERRORS: dict[type[DDTreeError], tuple[int, str, int | None]] = {
    BusyError: (429, "queue_full", None),
    ClosingError: (503, "shutting_down", 5),
    TimeoutReached: (504, "timeout", None),
    CacheMemoryError: (503, "out_of_memory", 5),
}
OPEN_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json"}
)
"""Paths that need no key; the dashboard's files need none either."""
BODY_PATIENCE = 30.0
"""Longest pause within a body, in seconds."""
BODY_TIME = 300.0
"""Seconds that a whole body may take."""
_LINGER = 2.0  # longest pause within a body that is too long
_DISCARDED = 16  # most of such a body that is read, in limits
T = TypeVar("T")


class ApiError(HTTPException):
    """An error response in OpenAI's form.

    Args:
        status: HTTP status, as 400.
        message: one line for people.
        param: the field of the request that is at fault.
        code: one word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # What a client sent may be part of the message.
        short = message if len(message) <= _LONGEST else message[:_LONGEST] + " ..."
        super().__init__(status, short, headers)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the response's JSON."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        if self.status_code == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the response."""
        return json_response(self.body(), self.status_code, self.headers)


def invalid_value(param: str, message: str) -> ApiError:
    """Return the error for a field whose value is out of range."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(name: str, reason: str) -> ApiError:
    """Return the error for a field that asks for what there is not."""
    return ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")


def api_error(error: Exception, fields: Collection[str] = ()) -> ApiError:
    """Return the response to any exception.

    Args:
        error: the exception.
        fields: names of the request's fields, to find the one that an error of the engine is about.
    """
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split())
    for kind, (status, code, seconds) in _SERVER_ERRORS.items():
        if isinstance(error, kind):
            retry_after = getattr(error, "retry_after", seconds)
            headers = None if retry_after is None else {"Retry-After": str(retry_after)}
            return ApiError(status, message, code=code, headers=headers)
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if "the context holds" in message else "invalid_prompt"
        param = next((name for name in ("messages", "prompt") if name in fields), None)
        return ApiError(400, message, param=param, code=code)
    if isinstance(error, ConfigError):
        named = next((word for word in re.findall(r"\w+", message)[:8] if word in fields), None)
        return ApiError(400, message, param=named, code="invalid_value")
    if isinstance(error, DDTreeError) and not isinstance(error, EngineError):
        return ApiError(500, message, code="model_error")
    # Only the server's log says more.
    return ApiError(500, "the server failed to answer: its log tells why", code="internal_error")


def validation_error(error: RequestValidationError) -> ApiError:
    """Return the response to a request that its schema refuses, for the first field at fault."""
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "not valid")
        return ApiError(400, f"the body is no JSON: {reason} (at {first['loc'][-1]})", code="invalid_json")
    place = _place(first["loc"])
    if not place:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    about = [one["loc"] for one in found if _place(one["loc"]) == place]
    branches = dict.fromkeys(str(part) for location in about for part in location[1:] if _is_branch(part))
    message = first["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("Field required", "is required")
    # Each branch of a union has its own complaint; the list of accepted types is clearer.
    if len(branches) > 1:
        message = f"must be {' or '.join(branches)}"
    return invalid_value(place, f"{place}: {message}")


def _is_branch(part: int | str) -> bool:
    """Return whether a part of pydantic's path names the branch of a union."""
    return isinstance(part, str) and _UNION_BRANCH.fullmatch(part) is not None


def _place(location: tuple[int | str, ...]) -> str:
    """Return pydantic's path as `messages[0].role`."""
    text = ""
    for part in location[1:]:
        if _is_branch(part):
            break
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def dumps(value: Any) -> str:
    """Return compact JSON in one line, which UTF-8 can hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(dumps(value), status, headers, media_type="application/json")


def event(value: Any, name: str | None = None) -> str:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(value)}\n\n"


class EventStream(StreamingResponse):
    """Sends the events that `source` yields. `source` is closed at once when the client leaves.

    A client that reads slowly holds up `source` and nothing else.

    Args:
        source: yields events.
        ended: called at the end in any case, even when nothing was sent.
    """

    def __init__(self, source: AsyncGenerator[str, None], ended: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(source, headers=headers, media_type="text/event-stream")
        self._source = source
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
            await self._source.aclose()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None when the client leaves before it; then `work` is cancelled."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class RequestGuard:
    """Reads a request's body and passes the request on, or answers it with 401, 408, 413, 415 or 421.

    Args:
        app: the application behind it.
        keys: API keys. Every path but the open ones needs one of them, unless there are none.
        hosts: names allowed in the Host header; None for any. This keeps out pages of other sites whose name was made
            to lead to this machine (DNS rebinding).
        limit: most bytes of a body, as 4 MiB.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], hosts: Iterable[str] | None, limit: int) -> None:
        self._app = app
        self._keys = [_digest(key) for key in keys]
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            self._check(scope["method"], scope["path"], headers)
            body = await self._read(headers.get("content-length", ""), receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replayed, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            message = "this server does not go by that name: see --allowed-host"
            raise ApiError(421, message, code="unknown_host")
        needs_key = self._keys and path not in OPEN_PATHS and not path.startswith("/dashboard/")
        if needs_key and not self._authorized(headers.get("authorization", "")):
            message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # Pages of other sites may send any other type without asking the server first.
        if method == "POST" and not re.fullmatch(r"application/(\S+\+)?json", kind):
            message = "send JSON, as Content-Type: application/json"
            raise ApiError(415, message, code="unsupported_media_type")

    def _authorized(self, header: str) -> bool:
        """Return whether a header holds one of the keys, in a time that does not depend on how nearly."""
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(known, digest) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    async def _read(self, length: str, receive: Receive) -> bytes:
        parts: list[bytes] = []
        announced = int(length[:20]) if length.isdigit() else 0
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_TIME):
                # A body that is too long is read on for a while: its sender would not see the response otherwise.
                while more and size <= _DISCARDED * self._limit:
                    too_long = max(size, announced) > self._limit
                    async with asyncio.timeout(_LINGER if too_long else BODY_PATIENCE):
                        part = await receive()
                    if part["type"] == "http.disconnect":
                        raise ApiError(400, "the client left before its body was complete")
                    if not too_long:
                        parts.append(part.get("body", b""))
                    size += len(part.get("body", b""))
                    more = part.get("more_body", False)
        except TimeoutError as error:
            if max(size, announced) <= self._limit:
                close = {"Connection": "close"}
                message = "the body did not come in time"
                raise ApiError(408, message, code="request_timeout", headers=close) from error
        if max(size, announced) > self._limit:
            message = f"the body is longer than {self._limit} bytes, the most allowed"
            raise ApiError(413, message, code="request_too_large")
        return b"".join(parts)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _host(header: str) -> str:
    """Return the name in a Host header, without port and without the brackets of an IPv6 address."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]
