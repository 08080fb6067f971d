"""What the dashboard and operators use: the state, reports of rounds as they come, and how to draft from now on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response

from ddtree.server.http import json_response
from ddtree.server.schemas import DraftingRequest
from ddtree.server.sse import DESCRIBED, EventStream, data
from ddtree.server.state import Serving
from ddtree.server.worker import Service

STATE_EVERY = 1.0
"""Seconds between two states in the stream of events."""
_KEPT = 64

router = APIRouter()


@router.get("/api/drafting")
async def drafting(request: Request) -> Response:
    """How answers are drafted where their requests say nothing."""
    return json_response(Serving.of(request).service.drafting.as_dict())


@router.post("/api/drafting")
async def set_drafting(body: DraftingRequest, request: Request) -> Response:
    """Change that, for running answers too, from the next round on. Texts stay the same."""
    service = Serving.of(request).service
    # Null is a value: all drafters. An unknown field is an error here, as a misspelt one would change nothing.
    changes = body.model_dump(exclude_unset=True)
    service.set_drafting(service.drafting.merged(changes))
    return json_response(service.drafting.as_dict())


@router.get("/api/state")
async def state(request: Request) -> Response:
    """What goes on."""
    return json_response(Serving.of(request).service.state())


@router.get("/api/events", responses=DESCRIBED)
async def events(request: Request) -> Response:
    """Server-sent events: `round` reports as they come, and the `state` once a second."""
    reports = _Reports(Serving.of(request).service)
    return EventStream(reports.stream(), reports.close)


class _Reports:
    """Reports of rounds for one reader, who misses the oldest of them when it is too slow."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.close = service.watch(self._put)

    def _put(self, report: dict[str, Any]) -> None:
        self._waiting.append(report)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ready.set)

    async def stream(self) -> AsyncGenerator[str, None]:
        """Ends with the service, which would otherwise wait for its readers."""
        due = self._loop.time()
        while self._service.health["status"] not in ("closing", "stopped", "failed"):
            if self._loop.time() >= due:
                yield data(self._service.state(), "state")
                due = self._loop.time() + STATE_EVERY
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._ready.wait()
            self._ready.clear()
            while self._waiting:
                yield data(self._waiting.popleft(), "round")
