"""One answer on its way from the engine's thread to its reader: request, handle, deltas, queue, errors."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ddtree.engine.sequence import Result, Sequence
from ddtree.errors import DDTreeError
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import TokenLogprobs

T = TypeVar("T")


class BusyError(DDTreeError):
    """The queue is full: HTTP 429.

    Attributes:
        retry_after: estimated whole seconds until there is room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosingError(DDTreeError):
    """The server is shutting down, or its engine could not be restored: HTTP 503."""


class TimeoutReached(DDTreeError):
    """An answer took longer than `ServerLimits.request_timeout`: HTTP 504."""


class EngineError(DDTreeError):
    """The engine failed and ended every running answer: HTTP 500."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the engine failed ({cause}): send the request again")


@dataclass(frozen=True)
class GenerationRequest:
    """Ask for one answer.

    Attributes:
        prompt: token ids.
        params: how to sample.
        drafting: fields of `DraftSettings` that are fixed for this answer; the others follow the server's, live.
    """

    prompt: list[int]
    params: SamplingParams
    drafting: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TokenDelta:
    """Hold what is new of one answer since the last delta: typically the tokens of one round.

    Attributes:
        text: text that became final; it may lag behind the tokens.
        tokens: ids of the new tokens.
        origins: for each of `tokens`, the depth at which it was drafted and accepted (1, 2, ...), or 0 for a token that
            the target added.
        logprobs: for each of `tokens`; empty unless asked for.
        prompt_logprobs: for the prompt's tokens after the first, in the first delta, if asked for.
        result: the whole answer, in the last delta, unless `error` is set.
        error: why the answer ended early, in the last delta.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    result: Result | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Return whether no delta follows."""
        return self.result is not None or self.error is not None

    @staticmethod
    def joined(deltas: list[TokenDelta]) -> TokenDelta:
        """Return successive deltas of one answer as one. There must be at least one."""
        return TokenDelta(
            text="".join(delta.text for delta in deltas),
            tokens=[token for delta in deltas for token in delta.tokens],
            origins=[origin for delta in deltas for origin in delta.origins],
            logprobs=[entry for delta in deltas for entry in delta.logprobs],
            prompt_logprobs=deltas[0].prompt_logprobs,
            result=deltas[-1].result,
            error=deltas[-1].error,
        )


class DeltaQueue(Generic[T]):
    """Carries items from the engine's thread to the event loop that made the queue. `put` never waits.

    Args:
        most: items kept for a slow reader, as 64; the oldest are dropped. None keeps all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque(maxlen=most)
        self._ready = asyncio.Event()

    def put(self, item: T) -> None:
        """Add an item, from any thread."""
        self._items.append(item)
        # `take` clears the event before it looks for items. A loop that is closed has no readers left.
        if not self._ready.is_set():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self, patience: float) -> list[T]:
        """Return all items put since the last call; wait up to `patience` seconds for the first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._ready.wait()
        self._ready.clear()
        return [self._items.popleft() for _ in range(len(self._items))]


@dataclass(eq=False)
class RequestHandle:
    """One answer in the engine's thread. Cancel it with `EngineThread.cancel`.

    Attributes:
        request: what was asked for.
        sequence: the engine's sequence.
        queue: receives (index, delta) for each delta.
        index: the answer's place in its HTTP request, as 0.
        cancelled: the answer is to be ended.
        left_queue: the engine has begun with its prompt.
        submitted: time of submission (`time.perf_counter`).
        latest: time of the latest token, which the engine's thread sets.
        ttft: seconds from submission to the first token, which it sets too; None before.
    """

    request: GenerationRequest
    sequence: Sequence
    queue: DeltaQueue[tuple[int, TokenDelta]]
    index: int
    cancelled: bool = False
    left_queue: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    latest: float = 0.0
    ttft: float | None = None

    @property
    def tpot(self) -> float | None:
        """Return the seconds per token after the first; None before the second token."""
        tokens = self.sequence.output_length
        if self.ttft is None or tokens < 2:
            return None
        return (self.latest - self.submitted - self.ttft) / (tokens - 1)

    def take_new(self) -> TokenDelta | None:
        """Return what is new since the last call, or None."""
        sequence = self.sequence
        new, ended = sequence.take_new(), sequence.finish_reason is not None
        if not new.tokens and not ended:
            return None
        return TokenDelta(
            text=new.text,
            tokens=new.tokens,
            origins=new.origins,
            logprobs=new.logprobs or [],
            prompt_logprobs=sequence.prompt_logprobs if self.ttft is None else None,
            result=Result.of(sequence) if ended and sequence.error is None else None,
            error=sequence.error,
        )
