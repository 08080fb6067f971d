"""An admitted answer: what its reader has been told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ddtree.engine.sequence import Result, Sequence
from ddtree.server.events import Event


class Ticket:
    """One answer on its way; the handle to cancel it by. Its fields belong to the engine's thread.

    Attributes:
        sequence: the engine's own.
        deliver: takes its events.
        drafting: the fields of `Drafting` that its request fixes.
        joined: its prompt is being, or was, processed.
        submitted, first, latest: when (`time.perf_counter`) it was submitted, and got its first and latest tokens.
    """

    def __init__(
        self, sequence: Sequence, deliver: Callable[[Event], None], drafting: Mapping[str, Any]
    ) -> None:
        self.sequence = sequence
        self.deliver = deliver
        self.drafting = dict(drafting)
        self.submitted = time.perf_counter()
        self.joined = False
        self.first: float | None = None
        self.latest = self.submitted
        self._told = 0

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None without one after it."""
        if self.first is None or self._told < 2:
            return None
        return (self.latest - self.first) / (self._told - 1)

    def event(self) -> Event | None:
        """What is new since the last call; None when nothing is."""
        sequence, told = self.sequence, self._told
        known = sequence.output_length
        ended = sequence.finish_reason is not None
        if known == told and not ended:
            return None
        self._told = known
        at = sequence.prompt_length
        failed = sequence.error
        return Event(
            text="" if sequence.text is None else sequence.text.take(),
            tokens=sequence.tokens[at + told : at + known],
            origins=sequence.origins[told:known],
            logprobs=None if sequence.logprobs is None else sequence.logprobs[told:known],
            prompt_logprobs=None if told else sequence.prompt_logprobs,
            result=Result.of(sequence) if ended and failed is None else None,
            error=failed,
        )
