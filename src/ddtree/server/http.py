"""What every answer over HTTP shares: JSON as clients read it, OpenAI's form of errors, ids."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ddtree.errors import CacheMemoryError, ConfigError, DDTreeError, PromptError
from ddtree.server.limits import BusyError, ClosingError, EngineError, TimeoutReached

_UNION_BRANCH = re.compile(r"str|int|float|bool|list|dict|(list|dict|union|function-\w+|constrained-\w+)\[.*")


_LONGEST = 1000
"""Characters of a message."""
# Python and JavaScript take these for the ends of lines, and events end at lines.
_LINE_ENDS = [(char, f"\\u{ord(char):04x}") for char in "\x85\u2028\u2029"]


class ApiError(HTTPException):
    """An answer other than 200, in OpenAI's form.

    Args:
        status: of HTTP.
        message: one line for people.
        param: the field of the request that is at fault.
        code: one word for programs.
        retry_after: seconds after which another try may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        more = dict(headers or {})
        if retry_after is not None:
            more["Retry-After"] = str(retry_after)
        # What a client sent may stand in it.
        super().__init__(status, message if len(message) <= _LONGEST else message[:_LONGEST] + " ...", more)
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status_code == 429:
            return "rate_limit_error"
        return "server_error" if self.status_code >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status_code, self.headers)


def dumps(value: Any) -> str:
    """Compact JSON in one line. Half of a surrogate pair, which UTF-8 cannot hold, is written as an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    for char, escape in _LINE_ENDS:
        text = text.replace(char, escape)
    return text


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def api_error(error: Exception, fields: Mapping[str, Any] | None = None) -> ApiError:
    """What a client is told of an error.

    Args:
        error: any exception.
        fields: names of the request's fields, to tell which one an error of the engine is about.
    """
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split())
    if isinstance(error, BusyError):
        return ApiError(429, message, code="queue_full", retry_after=error.retry_after)
    if isinstance(error, ClosingError):
        return ApiError(503, message, code="shutting_down", retry_after=5)
    if isinstance(error, TimeoutReached):
        return ApiError(504, message, code="timeout")
    if isinstance(error, CacheMemoryError):
        return ApiError(503, message, code="out_of_memory", retry_after=5)
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if "the context holds" in message else "invalid_prompt"
        param = next((name for name in ("messages", "prompt") if name in (fields or ())), None)
        return ApiError(400, message, param=param, code=code)
    if isinstance(error, ConfigError):
        named = next((word for word in re.findall(r"\w+", message)[:8] if word in (fields or ())), None)
        return ApiError(400, message, param=named, code="invalid_value")
    if isinstance(error, DDTreeError) and not isinstance(error, EngineError):
        return ApiError(500, message, code="model_error")
    # What it was about is for the server's log only.
    return ApiError(500, "the server failed to answer: its log tells why", code="internal_error")


def validation_error(error: RequestValidationError) -> ApiError:
    """What is wrong with a request that its schema refuses: the first field at fault."""
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "not valid")
        return ApiError(400, f"the body is no JSON: {reason} (at {first['loc'][-1]})", code="invalid_json")
    place = _place(first["loc"])
    if not place:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    about = [one for one in found if _place(one["loc"]) == place]
    branches = dict.fromkeys(branch for one in about if (branch := _branch(one["loc"])))
    # Each branch of a union has its own complaint; what it would take says it better.
    message = f"must be {' or '.join(branches)}" if len(branches) > 1 else _sentence(about[0]["msg"])
    return ApiError(400, f"{place}: {message}", param=place, code="invalid_value")


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message.replace("Input should be", "must be").replace("Field required", "is required")


def _place(location: tuple[Any, ...]) -> str:
    """`messages[0].role` out of pydantic's path."""
    text = ""
    for part in location[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _UNION_BRANCH.fullmatch(part):
            break
        else:
            text += f".{part}" if text else part
    return text


def _branch(location: tuple[Any, ...]) -> str | None:
    """The branch of a union in pydantic's path."""
    return next(
        (part for part in location[1:] if isinstance(part, str) and _UNION_BRANCH.fullmatch(part)), None
    )
