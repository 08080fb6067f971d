"""Server-sent events: a response that is written as it comes about, and ends when its reader leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ddtree.server.http import dumps

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
PATIENCE = 15.0
"""Seconds without a word after which a comment shows that the connection is alive."""
DESCRIBED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What the API's description says of a route that may stream."""
COMMENT = ": waiting\n\n"


def data(value: Any, event: str | None = None) -> str:
    """One event; JSON has no line breaks."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {dumps(value)}\n\n"


class EventStream(Response):
    """Sends what `source` yields. When the reader leaves, `source` is closed at once, at whatever it waits for.

    A reader that is slower than `source` holds up `source`, nothing else. `ended` is called in any case, even when
    nothing was sent.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[str, None], ended: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended()
            finished = sending.done()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._source.aclose()
        # A write to a connection that is gone is no failure of ours.
        if finished and not sending.cancelled() and not isinstance(sending.exception(), OSError):
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._source:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the coroutine `work`, or None when the client leaves before; then `work` is cancelled."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
