"""What one way of decoding made of one prompt, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ddtree.sampling import SamplingParams


@dataclass
class Answer:
    """One measurement.

    Attributes:
        tokens: the output.
        total: seconds from the prompt to the end.
        ttft: of these, until the first token; the rest is decoding.
        rounds, nodes: forward passes after the prompt's, drafted nodes verified in them.
        accepted: how often so many drafted tokens were accepted in a round.
        seconds: by part of the round.
        arms: how many rounds were decoded in which way, where that was chosen round by round.
        comparable: the text must be that of plain decoding.
    """

    tokens: list[int]
    total: float
    ttft: float
    rounds: int = 0
    nodes: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    arms: dict[str, int] = field(default_factory=dict)
    comparable: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the tokens."""
        rounds = self.rounds
        drafted = sum(depth * count for depth, count in self.accepted.items())
        return {
            "tokens": len(self.tokens),
            "total_s": round(self.total, 6),
            "decode_s": round(self.total - self.ttft, 6),
            "ttft_s": round(self.ttft, 6),
            "rounds": rounds,
            "nodes": self.nodes,
            "tau": round(1 + drafted / rounds, 4) if rounds else None,
            "accepted_depth": {str(depth): self.accepted[depth] for depth in sorted(self.accepted)},
            "seconds": {part: round(seconds, 6) for part, seconds in self.seconds.items()},
            "arms": dict(sorted(self.arms.items())),
        }


class Way(Protocol):
    """A way of decoding."""

    name: str

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Decode one prompt alone, and measure it."""

    def learnt(self) -> list[dict[str, Any]]:
        """Lines for the raw figures: what it has learnt of the machine and of acceptance."""
