"""How much is drafted for each request, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree.policy import OFF, Arm, Choice
from ddtree.vllm.drafting import Drafting
from ddtree.vllm.reader import Reader
from ddtree.vllm.trees import Nodes, Row
from ddtree.vllm.verify import Verified

_UNMEASURED_BUDGET = 16


@dataclass
class Figures:
    """What was drafted and came of it, of all requests.

    Attributes:
        steps: verifications of a request, of the root alone included.
        drafted_steps: those with drafted nodes.
        nodes: drafted nodes verified.
        accepted: of them.
        accepted_per_depth: accepted nodes by their depth.
        arms: steps by how they were drafted for.
        seconds: time by part of the step.
    """

    steps: int = 0
    drafted_steps: int = 0
    nodes: int = 0
    accepted: int = 0
    accepted_per_depth: Counter[str] = field(default_factory=Counter)
    arms: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def count(self, nodes: int, accepted: int, arm: str) -> None:
        """A request was verified with so many drafted nodes, of which the first `accepted` depths came true."""
        self.steps += 1
        self.drafted_steps += nodes > 0
        self.nodes += nodes
        self.accepted += accepted
        self.accepted_per_depth.update(str(depth) for depth in range(1, accepted + 1))
        self.arms[arm] += 1

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()
        }


class Planning:
    """Decides how each request is drafted for, step by step."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting
        self.figures = Figures()
        self._choices: dict[str, Choice] = {}

    def clock(self, part: str, seconds: float) -> None:
        self.figures.seconds[part] += seconds

    def draft(
        self, readers: Sequence[Reader], rows: Sequence[Row], verified: Mapping[str, Verified]
    ) -> dict[str, list[int]]:
        """Note what the step came to, and draft for the next one: the nodes besides the root, by request."""
        self._count(readers, rows, verified)
        started = time.perf_counter()
        ready = [
            reader for reader in readers if reader.name in verified and reader.drafts and not reader.ended
        ]
        self._choices = {reader.name: _fixed(reader) for reader in ready}
        tree = self.drafting.draft(self._choices)
        drafted = {}
        for place, reader in enumerate(self.drafting.rows):
            if reader.name in self._choices:
                nodes = Nodes.of(tree, place)
                reader.drafted = nodes
                drafted[reader.name] = nodes.tokens[1:]
        self.clock("draft", time.perf_counter() - started)
        return drafted

    def _count(
        self, readers: Sequence[Reader], rows: Sequence[Row], verified: Mapping[str, Verified]
    ) -> None:
        for reader, row in zip(readers, rows, strict=True):
            found = verified.get(reader.name)
            if found is not None:
                arm = self._choices.get(reader.name, Choice(OFF, 0)).arm
                self.figures.count(len(row.nodes) - 1, len(found.path) - 1, str(arm))


def _fixed(reader: Reader) -> Choice:
    request = reader.request
    method = "tree" if request.method == "auto" else request.method
    budget = _UNMEASURED_BUDGET if request.budget == "auto" else request.budget
    return Choice(Arm(method, request.members), budget)
