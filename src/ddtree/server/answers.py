"""The answers to one request: admitted together, read as they come or as a whole, counted and timed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddtree.engine.sequence import Result
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import TokenLogprobs
from ddtree.server.events import Event
from ddtree.server.inbox import Inbox
from ddtree.server.limits import ClosingError
from ddtree.server.sse import PATIENCE
from ddtree.server.worker import Asked, Service


@dataclass
class Answer:
    """What has come of one answer so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    result: Result | None = None

    def add(self, event: Event) -> None:
        self.text += event.text
        self.tokens += event.tokens
        self.origins += event.origins
        self.logprobs += event.logprobs or []
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.result = event.result

    @property
    def cached_tokens(self) -> int:
        return 0 if self.result is None else self.result.stats.cached_tokens

    @property
    def finish_reason(self) -> str | None:
        return None if self.result is None else self.result.finish_reason


class Answers:
    """Submits at once; must be made in the event loop, and ended by `cancel` in any case.

    Args:
        asked: prompt and parameters of each answer.
        n: so many answers in a row share a prompt.
        drafting: what the request fixes of how to draft.
        silent: only what is found out about the prompts is wanted: the answers are passed on as empty.

    Raises:
        DDTreeError: as `Service.submit_all`.
    """

    def __init__(
        self,
        service: Service,
        asked: list[tuple[list[int], SamplingParams]],
        n: int,
        drafting: Mapping[str, Any] | None,
        *,
        silent: bool = False,
    ) -> None:
        self.answers = [Answer() for _ in asked]
        self._service = service
        self._n = n
        self._silent = silent
        self._prompt_tokens = sum(len(prompt) for prompt, _ in asked[::n])
        self._inbox = Inbox()
        text = service.model.tokenizer is not None
        self._tickets = service.submit_all([
            Asked(prompt, params, self._inbox.deliverer(i), drafting, text)
            for i, (prompt, params) in enumerate(asked)
        ])  # fmt: skip

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(number of the answer, event) until all have ended, each added to its answer before; None is a sign of life.

        Raises:
            Exception: what ended an answer early.
        """
        left = len(self.answers)
        while left:
            news = await self._inbox.take(PATIENCE)
            if not news:
                yield None
            for index, event in news:
                if event.error is not None:
                    raise event.error
                if event.result is not None:
                    left -= 1
                    if event.result.finish_reason == "cancelled":
                        raise ClosingError("the server shut down before the answer was complete: ask again")
                if self._silent:
                    event = _silenced(event)
                self.answers[index].add(event)
                yield index, event

    async def whole(self) -> list[Answer]:
        """All answers, once they have ended."""
        async for _ in self.events():
            pass
        return self.answers

    def cancel(self) -> None:
        """End what still runs."""
        for ticket in self._tickets:
            self._service.cancel(ticket)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of what has come so far."""
        completion = sum(len(answer.tokens) for answer in self.answers)
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }
        groups = (self.answers[i : i + self._n] for i in range(0, len(self.answers), self._n))
        cached = sum(max(answer.cached_tokens for answer in group) for group in groups)
        if cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def timings(self) -> list[dict[str, Any]]:
        """Figures of the answers that have ended."""
        return [
            {"index": index, **_timings(answer.result)}
            for index, answer in enumerate(self.answers)
            if answer.result is not None
        ]


def _silenced(event: Event) -> Event:
    result = event.result and replace(event.result, finish_reason="length")
    return Event("", [], [], prompt_logprobs=event.prompt_logprobs, result=result)


def _timings(result: Result) -> dict[str, Any]:
    """Milliseconds, and what drafting came to. `draft_n` and `draft_n_accepted` are llama.cpp's names."""
    stats = result.stats
    return {
        "prompt_n": stats.prompt_tokens,
        "cached_n": stats.cached_tokens,
        "predicted_n": stats.output_tokens,
        "time_to_first_token_ms": 1000 * stats.ttft,
        "time_per_output_token_ms": 1000 * stats.tpot,
        "total_ms": 1000 * stats.total,
        "tokens_per_second": stats.tokens_per_second,
        "rounds": stats.rounds,
        "draft_n": stats.nodes,
        "draft_n_accepted": sum(depth * count for depth, count in stats.accepted.items()),
        "tau": stats.tau,
        "arms": dict(stats.arms),
        "seconds": dict(stats.seconds),
        "seed": result.seed,
    }
