"""What reaches the reader of an answer, a round at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.engine.sequence import Result
from ddtree.sampling.sampler import TokenLogprobs


@dataclass(frozen=True)
class Event:
    """What a round made of one answer.

    Attributes:
        text: newly final text; "" where none has become final.
        tokens: ids chosen since the last event.
        origins: of each of `tokens`, the depth at which it was drafted and accepted (1..), or 0 for a bonus token.
        logprobs: of each of `tokens`; None unless asked for.
        prompt_logprobs: of the prompt's tokens after the first, on the first event, if asked for.
        result: the whole answer, on the last event, unless `error` stands in its place.
        error: why the answer ended early, on the last event.
    """

    text: str
    tokens: list[int]
    origins: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    result: Result | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Whether no event follows."""
        return self.result is not None or self.error is not None
