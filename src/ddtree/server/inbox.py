"""Where the engine's thread leaves events and the event loop picks them up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ddtree.server.events import Event


class Inbox:
    """Events of the answers to one request.

    Delivering never waits. What a slow reader has not taken yet is merged into one event an answer, so that nothing is
    lost and memory is bounded by the answers' length. Belongs to the event loop that made it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: dict[int, list[Event]] = {}
        self._ready = asyncio.Event()

    def deliverer(self, index: int) -> Callable[[Event], None]:
        """What takes the events of answer number `index`, from any thread."""
        return partial(self._put, index)

    async def take(self, patience: float) -> list[tuple[int, Event]]:
        """What has come since the last call, one event an answer; none after `patience` seconds without any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._ready.wait()
        self._ready.clear()
        with self._lock:
            pending, self._pending = self._pending, {}
        return [(index, merged(events)) for index, events in pending.items()]

    def _put(self, index: int, event: Event) -> None:
        with self._lock:
            first = not self._pending
            self._pending.setdefault(index, []).append(event)
        if first:
            # A loop that is closed has no readers left.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ready.set)


def merged(events: list[Event]) -> Event:
    """Successive events of one answer as one."""
    if len(events) == 1:
        return events[0]
    logprobs = [one.logprobs for one in events if one.logprobs is not None]
    return Event(
        text="".join(one.text for one in events),
        tokens=[token for one in events for token in one.tokens],
        origins=[origin for one in events for origin in one.origins],
        logprobs=[entry for part in logprobs for entry in part] if logprobs else None,
        prompt_logprobs=events[0].prompt_logprobs,
        result=events[-1].result,
        error=events[-1].error,
    )
