"""Measure decoding: time by part of the round, rounds, accepted depths."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PARTS = ("prefill", "draft", "build", "verify", "walk", "commit")


class Clock:
    """Counts seconds spent in named parts, as in `with clock("draft"):`.

    The time of an inner part does not count to the outer one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._lap()
        self._running.append(part)
        try:
            yield
        finally:
            self._lap()
            self._running.pop()

    def _lap(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


@dataclass
class Stats:
    """Figures of one sequence.

    Attributes:
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        rounds: verifications it took part in.
        accepted: how often 0, 1, 2, ... drafted tokens were accepted in a round.
        arms: number of rounds by arm ("off", "tree@dflash", ...).
        nodes: drafted nodes verified in all.
        seconds: time by part of the round, over all its rounds (shared with the rows decoded beside it).
        ttft: seconds from the request to the first token, waiting included.
        total: seconds from the request to the end.
    """

    method: str = "off"
    drafter: str = "none"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    arms: Counter[str] = field(default_factory=Counter)
    nodes: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    ttft: float = 0.0
    total: float = 0.0

    @property
    def tau(self) -> float:
        """Acceptance length: tokens committed per round (accepted drafted nodes + 1)."""
        return 1 + sum(k * n for k, n in self.accepted.items()) / self.rounds if self.rounds else 0.0

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.total - self.ttft) / max(1, self.output_tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.output_tokens / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the figures as plain JSON values."""
        return {
            "method": self.method,
            "drafter": self.drafter,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "rounds": self.rounds,
            "arms": dict(self.arms),
            "nodes": self.nodes,
            "tau": self.tau,
            "accepted_depth": {str(k): self.accepted[k] for k in sorted(self.accepted)},
            "seconds": dict(self.seconds),
            "ttft": self.ttft,
            "tpot": self.tpot,
            "total": self.total,
            "tokens_per_second": self.tokens_per_second,
        }
