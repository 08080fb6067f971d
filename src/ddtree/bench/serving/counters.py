"""Acceptance by a server's own counters, which vLLM named and others took over."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_LINE = re.compile(
    r"vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(.*)\})? +([0-9.eE+]+)"
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass
class Counters:
    """Counts since a server began, or between two readings.

    Attributes:
        drafts: rounds of a sequence that were drafted for.
        drafted: drafted tokens; of trees, their nodes.
        accepted: those that the target confirmed.
        positions: accepted ones by depth, the first one at 0.
    """

    drafts: float = 0
    drafted: float = 0
    accepted: float = 0
    positions: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def read(text: str) -> Counters:
        """Out of Prometheus' text format, summed over labels; zeros where the server has no such counters."""
        found = Counters()
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            name, labels, value = match[1], match[2] or "", float(match[3])
            if name == "drafts":
                found.drafts += value
            elif name == "draft_tokens":
                found.drafted += value
            elif name == "accepted_tokens":
                found.accepted += value
            elif position := _POSITION.search(labels):
                place = int(position[1])
                found.positions[place] = found.positions.get(place, 0) + value
        return found

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._with(other, -1)

    def _with(self, other: Counters, sign: int) -> Counters:
        places = sorted(self.positions.keys() | other.positions.keys())
        return Counters(
            self.drafts + sign * other.drafts,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            {place: self.positions.get(place, 0) + sign * other.positions.get(place, 0) for place in places},
        )

    @property
    def tau(self) -> float | None:
        """Tokens a round of those drafted for: accepted ones and one more; None where there were none."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "drafts": self.drafts,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "accepted_per_position": [count for _, count in sorted(self.positions.items())],
            "acceptance_length": self.tau,
        }
