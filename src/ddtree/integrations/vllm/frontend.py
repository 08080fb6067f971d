"""Requests on their way into vLLM: `ddtree` in HTTP bodies, what is refused with 400, and the counters' route.

vLLM's requests have a place for what extensions need, `vllm_xargs`, which takes no objects, and its sampling refuses
`min_p` and `logit_bias` beside any drafting. So the middleware moves these fields there as JSON text. It checks them
too: a stream has begun its answer by the time vLLM checks a request.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree.errors import ConfigError
from ddtree.integrations.vllm.settings import (
    COUNTERS_METHOD,
    DRAFTING_FAILED,
    KEY,
    MOVED_FIELDS,
    RequestFields,
    refused_field,
    sampling_params,
)
from ddtree.sampling.params import SamplingParams, check_vocabulary

try:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor
except ImportError:
    # The middleware needs nothing of vLLM.
    LogitsProcessor = object

METRICS = "/ddtree/metrics"
_ARGUMENTS = "vllm_xargs"
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend")
_MOVED = (KEY, *MOVED_FIELDS)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Help and, where there is one, the label of each counter.
_METRICS = {
    "steps": ("Verifications of a request, drafted for or not.", None),
    "drafted_steps": ("Verifications of a request that had drafted nodes.", None),
    "nodes": ("Drafted nodes verified; all branches of a tree count.", None),
    "accepted": ("Drafted nodes accepted.", None),
    "accepted_per_depth": ("Accepted nodes by their depth in the tree.", "depth"),
    "arms": ("Verifications of a request by the way it was drafted for.", "arm"),
    "seconds": ("Where the worker's time went.", "part"),
    DRAFTING_FAILED: ("Engines in which drafting has failed, and is off.", None),
}


class RequestCheck(LogitsProcessor):
    """Refuses requests that cannot be kept exact. vLLM calls `validate_params` of its logits processors for each one.

    It processes no logits and is never instantiated: the worker takes it off its config before a batch is made.
    """

    @classmethod
    def validate_params(cls, params: Any) -> None:
        """Raise VLLMValidationError, which names the field, for a request that cannot be kept exact."""
        refused = refused_field(params)
        if refused is not None:
            raise VLLMValidationError(refused[1], parameter=refused[0])
        try:
            sampling_params(params, RequestFields.read(params.extra_args))
        except ConfigError as error:
            names = (*params.__struct_fields__, "method", "budget", "depth")
            raise VLLMValidationError(str(error), parameter=_named_in(str(error), names)) from error


class FieldError(Exception):
    """A request that gets 400.

    Args:
        message: one line for people.
        field: the field at fault.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Middleware:
    """ASGI middleware of vLLM's server.

    vLLM puts it before its own, before the check of keys too. So a body is read only when the app asks for it: vLLM
    answers by itself what it refuses without reading, such as a request without a key or for an unknown path.

    Args:
        app: the server without it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for the counters' route, translate bodies that are JSON, and pass on everything else."""
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == METRICS:
            counts = await gather(scope["app"].state.engine_client)
            await Response(metrics_text(counts), media_type=_METRICS_TYPE)(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and _is_json(scope):
            await self._translated(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _translated(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = False
        refused: FieldError | None = None

        async def receive_translated() -> Message:
            """Return the whole body at once, and then what follows it, such as that the client has left."""
            nonlocal read, refused
            parts: list[bytes] = []
            while not read:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                parts.append(message.get("body", b""))
                read = not message.get("more_body", False)
            if not parts:
                return await receive()
            try:
                body = translate(b"".join(parts), _vocabulary(scope))
            except FieldError as error:
                refused = error
                raise
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_unless_refused(message: Message) -> None:
            if refused is None:
                await send(message)

        # The length is another one where fields move.
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        with suppress(FieldError):
            await self.app({**scope, "headers": headers}, receive_translated, send_unless_refused)
        if refused is not None:
            # vLLM's own form of OpenAI's errors, so that clients meet one form.
            error = {"message": str(refused), "type": "BadRequestError", "param": refused.field, "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)


def translate(body: bytes, vocab_size: int | None = None) -> bytes:
    """Return a request's body as vLLM takes it; the same object where nothing in it concerns drafting.

    Args:
        body: as the client sent it.
        vocab_size: of the model, e.g. 49152; None: token ids are not checked.

    Raises:
        FieldError: `ddtree` is no object of known fields, a value is out of range, or a field asks for a grammar by one
            of its former names.
    """
    if not any(b'"%s"' % name.encode() in body for name in (*_MOVED, *_GUIDED)):
        return body
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(sent, dict):
        return body
    for name in _GUIDED:
        if sent.get(name) is not None:
            raise FieldError(f"{name}: answers cannot be held to a grammar while trees are drafted", name)
    moved = {name: sent.pop(name) for name in _MOVED if name in sent}
    own = moved.pop(KEY, None)
    if own is not None and not isinstance(own, dict):
        raise FieldError(f"{KEY} must be an object of method, budget and depth, not {own!r}", KEY)
    wanted = {**(own or {}), **{name: value for name, value in moved.items() if value is not None}}
    text = json.dumps(wanted)
    try:
        fields = RequestFields.read({KEY: text})
        if vocab_size is not None:
            check_vocabulary(SamplingParams(logit_bias=fields.logit_bias), vocab_size)
    except ConfigError as error:
        raise FieldError(str(error), _named_in(str(error), MOVED_FIELDS) or KEY) from error
    others = {} if sent.get(_ARGUMENTS) is None else sent[_ARGUMENTS]
    # vLLM refuses what is no object.
    if wanted and isinstance(others, dict):
        sent[_ARGUMENTS] = {**others, KEY: text}
    return json.dumps(sent).encode()


async def gather(engine_client: Any) -> dict[str, Any]:
    """Return the workers' counters, summed over all engines behind a server.

    Workers may live in other processes, and with data parallelism there are several engines. The ranks of one engine
    count the same steps, so the first one's are taken.

    Args:
        engine_client: vLLM's `AsyncLLM`.
    """
    call = ("collective_rpc", COUNTERS_METHOD, None, (), None)
    engines = await engine_client.engine_core.call_utility_all_async(*call)
    total: dict[str, Any] = {}
    for first, *_ in engines:
        for name, value in first.items():
            if isinstance(value, Mapping):
                total.setdefault(name, Counter()).update(value)
            else:
                total[name] = total.get(name, 0) + value
    return total


def metrics_text(counts: Mapping[str, float | Mapping[str, float]]) -> str:
    """Return counters in Prometheus' text format; those that are no metric are left out."""
    lines = []
    for name, (about, label) in _METRICS.items():
        value = counts.get(name, 0)
        state = name == DRAFTING_FAILED
        full = f"ddtree_vllm_{name}" if state else f"ddtree_vllm_{name}_total"
        lines += [f"# HELP {full} {about}", f"# TYPE {full} {'gauge' if state else 'counter'}"]
        if isinstance(value, Mapping):
            lines += [f'{full}{{{label}="{_escaped(key)}"}} {number}' for key, number in value.items()]
        else:
            lines.append(f"{full} {value}")
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _vocabulary(scope: Scope) -> int | None:
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    return None if config is None else int(config.model_config.get_vocab_size())


def _is_json(scope: Scope) -> bool:
    kind = Headers(scope=scope).get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "application/json"


def _named_in(message: str, names: Sequence[str]) -> str | None:
    """Return the field that an error's message names among its first words."""
    return next((word for word in re.findall(r"\w+", message)[:8] if word in names), None)
