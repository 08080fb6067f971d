"""What a client saw of one answer, and the times that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Answer:
    """One request's answer, read as a stream. Times are in seconds since the request was sent.

    Attributes:
        began: when it was sent, by the clock of `time.perf_counter`.
        status: of HTTP; 0 where no response came.
        error: what went wrong, or None.
        text: in all.
        chunks: of each chunk with text, when it came and how many tokens there had been by then (None: not told).
        latency: when the stream ended.
        finish_reason: as told, or None.
        usage: as told: `prompt_tokens`, `completion_tokens` and so on; empty where it was not.
        timings: the server's own figures of this answer, where it is ddtree.
    """

    began: float
    status: int = 0
    error: str | None = None
    text: str = ""
    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    latency: float = 0.0
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether it came whole."""
        return self.error is None

    @property
    def ttft(self) -> float | None:
        """Time to the first chunk with text."""
        return self.chunks[0][0] if self.chunks else None

    @property
    def output_tokens(self) -> int | None:
        return self.usage.get("completion_tokens")

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage.get("prompt_tokens")

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not processed anew."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def tpot(self) -> float | None:
        """Time a token after the first one: (latency - ttft) / (output tokens - 1)."""
        tokens = self.output_tokens
        if self.ttft is None or tokens is None or tokens < 2:
            return None
        return (self.latency - self.ttft) / (tokens - 1)

    @property
    def chunk_gaps(self) -> list[float]:
        """Times between chunks with text, of several tokens each where a round brought several."""
        times = [when for when, _ in self.chunks]
        return [after - before for before, after in pairwise(times)]

    @property
    def token_gaps(self) -> list[float] | None:
        """The same, each gap shared by the chunk's tokens; None where the chunks do not tell how many they hold."""
        found: list[float] = []
        for (before, had), (after, has) in pairwise(self.chunks):
            if had is None or has is None:
                return None
            if has > had:
                found += [(after - before) / (has - had)] * (has - had)
        return found

    def record(self) -> dict[str, Any]:
        """As plain JSON values, without the text."""
        return {
            "status": self.status,
            "error": self.error,
            "latency": self.latency,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "chunks": [list(chunk) for chunk in self.chunks],
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "timings": self.timings,
        }
