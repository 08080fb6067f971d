"""What vLLM's HTTP server lacks for drafting: `ddtree` in requests, and counters. Named to it by `--middleware`.

vLLM's requests have a place for what extensions need, `vllm_xargs`, which takes no objects, and its sampling refuses
`min_p` and `logit_bias` beside any drafting. So these fields move there as JSON text, and `admission` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from ddtree.errors import ConfigError
from ddtree.integrations.vllm import counters, requests
from ddtree.integrations.vllm.settings import KEY
from ddtree.sampling.params import SamplingParams, check_vocabulary

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

METRICS = "/ddtree/metrics"
ARGUMENTS = "vllm_xargs"
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend")
_MOVED = (KEY, *requests.SAMPLED_HERE)
_LOOKED_AT = (*_MOVED, *_GUIDED)


class Refusal(Exception):
    """A request that gets 400.

    Args:
        message: one line for people.
        param: the field at fault.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class Middleware:
    """ASGI middleware of vLLM's server.

    vLLM puts it before its own, that which checks keys included. So a body is looked at only once it is asked for: what
    vLLM refuses without reading it, a request without a key or for an unknown path, is vLLM's to answer.

    Args:
        app: what it stands before.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] == "GET" and scope["path"] == METRICS:
            text = counters.text(await counters.gather(scope["app"].state.engine_client))
            return await _answer(send, 200, text.encode(), counters.CONTENT_TYPE)
        if scope["method"] != "POST" or not _is_json(scope):
            return await self.app(scope, receive, send)
        # The length is another one where fields move.
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        exchange = _Exchange(receive, send, _vocabulary(scope))
        with suppress(Refusal):
            await self.app({**scope, "headers": headers}, exchange.receive, exchange.send)
        if exchange.refusal is not None:
            await _answer(send, 400, _error(exchange.refusal), "application/json")


class _Exchange:
    """A request whose body is translated when it is first asked for, and its answer.

    Attributes:
        refusal: why the body could not be translated; the app's own answer is dropped then.
    """

    def __init__(self, receive: Receive, send: Send, vocab_size: int | None) -> None:
        self.refusal: Refusal | None = None
        self._receive = receive
        self._send = send
        self._vocab_size = vocab_size
        self._read = False

    async def receive(self) -> Message:
        """The whole body at once, then what comes after it: that the client has left. Raises Refusal."""
        parts = []
        while not self._read:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            self._read = not message.get("more_body", False)
        if not parts:
            return await self._receive()
        try:
            body = translate(b"".join(parts), self._vocab_size)
        except Refusal as error:
            self.refusal = error
            raise
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Pass the app's answer on."""
        if self.refusal is None:
            await self._send(message)


def translate(body: bytes, vocab_size: int | None = None) -> bytes:
    """A request's body as vLLM takes it; the same object where nothing in it concerns drafting.

    Args:
        body: as the client sent it.
        vocab_size: of the model; None: token ids are not checked.

    Raises:
        Refusal: `ddtree` is no object of known fields, a value is out of range, or a field asks for a grammar by one
            of its former names.
    """
    if not any(b'"%s"' % name.encode() in body for name in _LOOKED_AT):
        return body
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(sent, dict):
        return body
    for name in _GUIDED:
        if sent.get(name) is not None:
            raise Refusal(f"{name}: answers cannot be held to a grammar while trees are drafted", name)
    moved = {name: sent.pop(name) for name in _MOVED if name in sent}
    mine = moved.pop(KEY, None)
    if mine is not None and not isinstance(mine, dict):
        raise Refusal(f"{KEY} must be an object of method, budget and depth, not {mine!r}", KEY)
    try:
        requests.asked({KEY: mine})
        wanted = {**(mine or {}), **{name: value for name, value in moved.items() if value is not None}}
        asked = requests.asked({KEY: wanted})
        if vocab_size is not None:
            check_vocabulary(SamplingParams(logit_bias=asked.logit_bias), vocab_size)
    except ConfigError as error:
        named = requests.named_in(str(error), requests.SAMPLED_HERE)
        raise Refusal(str(error), named or KEY) from error
    others = {} if sent.get(ARGUMENTS) is None else sent[ARGUMENTS]
    # What is no object is vLLM's to refuse.
    if wanted and isinstance(others, dict):
        sent[ARGUMENTS] = {**others, KEY: json.dumps(wanted)}
    return json.dumps(sent).encode()


def _vocabulary(scope: Scope) -> int | None:
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    return None if config is None else int(config.model_config.get_vocab_size())


def _is_json(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name.lower() == b"content-type"]
    return any(kind.split(b";")[0].strip().lower() == b"application/json" for kind in kinds)


def _error(error: Refusal) -> bytes:
    # vLLM's own form of OpenAI's errors, so that clients meet one form.
    told = {"message": str(error), "type": "BadRequestError", "param": error.param, "code": 400}
    return json.dumps({"error": told}).encode()


async def _answer(send: Send, status: int, body: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
