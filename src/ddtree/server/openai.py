"""How answers become JSON: whole, or as chunks of a stream. Chats and completions fill in their choices."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response

from ddtree.server.answers import Answer, Answers
from ddtree.server.events import Event
from ddtree.server.http import api_error, json_response, new_id
from ddtree.server.schemas import Generation, StreamOptions
from ddtree.server.sse import COMMENT, DONE, EventStream, data, unless_left
from ddtree.server.state import Serving

LEFT = 499
"""Status of what is sent to a client that has left, and so to nobody; as in nginx."""
_log = logging.getLogger(__name__)


class Reply(ABC):
    """One reply, of as many choices as there are answers.

    Attributes:
        prefix: of its id.
        kind: OpenAI's `object` of a whole reply.
        chunk_kind: OpenAI's `object` of a chunk.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, serving: Serving, body: Generation, answers: Answers) -> None:
        self.serving = serving
        self.answers = answers
        self._options = body.stream_options or StreamOptions()  # type: ignore[call-arg]
        self._detailed = bool(body.ddtree_details)
        self._timed = self._detailed or bool(body.ddtree_timings)
        self._id, self._created = new_id(self.prefix), int(time.time())

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice begins with in a stream, before its first token."""

    @abstractmethod
    def piece(self, index: int, event: Event) -> dict[str, Any]:
        """What has come of a choice."""

    @abstractmethod
    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """What a choice ends with in a stream."""

    async def whole(self) -> dict[str, Any]:
        answers = await self.answers.whole()
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        if self._detailed:
            for choice, answer in zip(choices, answers, strict=True):
                choice["ddtree"] = self._details(answer.origins, answer.tokens)
        reply = {**self._head(self.kind), "choices": choices, "usage": self.answers.usage()}
        if self._timed:
            reply["ddtree"] = {"timings": self.answers.timings()}
        return reply

    async def stream(self) -> AsyncGenerator[str, None]:
        """Server-sent events. What goes wrong once it has begun is told in one of them."""
        opened: set[int] = set()
        try:
            async for news in self.answers.events():
                if news is None:
                    yield COMMENT
                    continue
                index, event = news
                # With the first token, not before: clients take the first chunk for it when they measure.
                if index not in opened:
                    opened.add(index)
                    opening = self.opening(index)
                    if opening is not None:
                        yield self._chunk([opening])
                if event.text or (event.tokens and (self._detailed or event.logprobs)):
                    more = {"ddtree": self._details(event.origins, event.tokens)} if self._detailed else {}
                    yield self._chunk([self.piece(index, event)], more)
                if event.result is not None:
                    yield self._last(index, event.result.finish_reason)
            if self._options.include_usage:
                timings = {"ddtree": {"timings": self.answers.timings()}} if self._timed else {}
                yield self._chunk([], {"usage": self.answers.usage(), **timings})
        except Exception as error:
            known = api_error(error)
            if known.status_code == 500:
                _log.exception("an answer failed")
            yield data(known.body())
        yield DONE

    def _details(self, origins: list[int], tokens: list[int]) -> dict[str, Any]:
        return {
            "origins": origins,
            "tokens": tokens,
            "texts": [self.serving.tokens(token)[0] for token in tokens],
        }

    def _last(self, index: int, reason: str) -> str:
        """The chunk that ends a choice, with its figures where no later one will carry them."""
        more: dict[str, Any] = {}
        if self._timed and not self._options.include_usage:
            more = {"ddtree": {"timings": [one for one in self.answers.timings() if one["index"] == index]}}
        return self._chunk([self.ending(index, reason)], more)

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> str:
        chunk = {**self._head(self.chunk_kind), "choices": choices, **(more or {})}
        if self._options.continuous_usage_stats:
            chunk.setdefault("usage", self.answers.usage())
        return data(chunk)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.serving.service.name}


async def answer(request: Request, reply: Reply, stream: bool) -> Response:
    """Send a reply; its answers end when the client leaves."""
    if stream:
        return EventStream(reply.stream(), reply.answers.cancel)
    try:
        whole = await unless_left(request.receive, reply.whole())
    finally:
        reply.answers.cancel()
    return Response(status_code=LEFT) if whole is None else json_response(whole)
