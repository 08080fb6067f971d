"""Parts of every HTTP response: errors in OpenAI's form, JSON, server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

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
# Python and JavaScript take these for the ends of lines, and events end at lines.
_LINE_ENDS = [(char, f"\\u{ord(char):04x}") for char in "\x85\u2028\u2029"]
# Status, code and default Retry-After seconds of errors that are not the request's fault.
_SERVER_ERRORS: dict[type[DDTreeError], tuple[int, str, int | None]] = {
    BusyError: (429, "queue_full", None),
    ClosingError: (503, "shutting_down", 5),
    TimeoutReached: (504, "timeout", None),
    CacheMemoryError: (503, "out_of_memory", 5),
}
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
        super().__init__(status, short, dict(headers or {}))
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


def api_error(error: Exception, fields: Mapping[str, Any] | None = None) -> ApiError:
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
        param = next((name for name in ("messages", "prompt") if name in (fields or ())), None)
        return ApiError(400, message, param=param, code=code)
    if isinstance(error, ConfigError):
        named = next((word for word in re.findall(r"\w+", message)[:8] if word in (fields or ())), None)
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
    about = [one for one in found if _place(one["loc"]) == place]
    parts = [part for one in about for part in one["loc"][1:] if _is_branch(part)]
    branches = dict.fromkeys(parts)
    # Each branch of a union has its own complaint; the list of accepted types is clearer.
    if len(branches) > 1:
        message = f"must be {' or '.join(branches)}"
    else:
        message = about[0]["msg"].removeprefix("Value error, ")
        message = message.replace("Input should be", "must be").replace("Field required", "is required")
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
    """Return compact JSON in one line. Half a surrogate pair, which UTF-8 cannot hold, is written as an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    for char, escape in _LINE_ENDS:
        text = text.replace(char, escape)
    return text


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(dumps(value), status, headers, media_type="application/json")


def new_id(prefix: str) -> str:
    """Return a random id, as `chatcmpl-` and 24 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(12)}"


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
