"""How much is drafted for each request, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree.engine.planner import Plan, Planner
from ddtree.integrations.vllm.request_state import Reader
from ddtree.integrations.vllm.trees import Nodes, Row
from ddtree.integrations.vllm.verify import Verified
from ddtree.policy import OFF
from ddtree.stats import PARTS, Clock


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
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

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


@dataclass(frozen=True)
class _Round:
    """What was drafted last, until it is verified.

    Attributes:
        names: of its rows.
        plan: of them.
        seconds: of its drafting, by part.
    """

    names: list[str]
    plan: Plan
    seconds: dict[str, float]


class Planning:
    """Decides how each request is drafted for, step by step.

    Args:
        rows: the requests that have a row of the drafter, in its order; kept up to date by whoever made it.
        planner: asks the policy and the drafter.
        clock: the planner's.
        nodes: most drafted nodes of a request.
        most: tokens that a step may process.

    Attributes:
        figures: what was drafted and came of it.
    """

    def __init__(self, rows: Sequence[Reader], planner: Planner, clock: Clock, nodes: int, most: int) -> None:
        self.figures = Figures()
        self._drafted = rows
        self._planner = planner
        self._clock = clock
        self._nodes = nodes
        self._most = most
        self._round: _Round | None = None
        self._step = dict.fromkeys(PARTS, 0.0)
        self._since = 0.0

    def clock(self, part: str, seconds: float) -> None:
        """A part of the step took so long; "verify" begins a step."""
        if part == "verify":
            self._step = dict.fromkeys(PARTS, 0.0)
        self._step[part] += seconds
        self.figures.seconds[part] += seconds

    def draft(
        self, readers: Sequence[Reader], rows: Sequence[Row], verified: Mapping[str, Verified]
    ) -> dict[str, list[int]]:
        """Note what a step came to, and draft for the next one.

        Args:
            readers: the requests of the step, in the batch's order.
            rows: their parts in it.
            verified: what each came to, by name; those whose prompt is not through are missing.

        Returns:
            The nodes besides the root, by name.
        """
        made, self._round = self._round, None
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self._count(readers, rows, verified)
        if made is not None:
            self._learn(made, rows, [reader.name for reader in readers], verified, elapsed)
        ready = {
            reader.name
            for reader in readers
            if reader.name in verified and reader.drafts and not reader.ended
        }
        places = [place for place, reader in enumerate(self._drafted) if reader.name in ready]
        if not places:
            return {}
        before = dict(self._clock.seconds)
        with self._clock("draft"):
            # What the scheduler would cut off need not be drafted.
            most = min(self._nodes, max(0, self._most // len(places) - 1))
            plan = self._planner.plan(self._drafted, most, places)
        spent = {part: self._clock.seconds[part] - before[part] for part in ("draft", "build")}
        for part, seconds in spent.items():
            self.figures.seconds[part] += seconds
        asked = [self._drafted[place] for place in places]
        self._round = _Round([reader.name for reader in asked], plan, spent)
        drafted = {}
        for row, reader in enumerate(asked):
            reader.fresh = False
            reader.drafted, reader.arm = Nodes.of(plan.tree, row), plan.choices[row].arm
            drafted[reader.name] = reader.drafted.tokens[1:]
        return drafted

    def _learn(
        self,
        made: _Round,
        rows: Sequence[Row],
        names: Sequence[str],
        verified: Mapping[str, Verified],
        elapsed: float,
    ) -> None:
        """Tell the policy what a round came to, where it was verified as drafted and nothing was done beside it."""
        if not made.plan.decided or len(rows) != len(made.names) or verified.keys() != set(made.names):
            return
        sizes = {name: len(row.nodes) for name, row in zip(names, rows, strict=True)}
        if [sizes[name] for name in made.names] != made.plan.tree.sizes:
            return
        own = [verified[name] for name in made.names]
        paths, answers = [found.path for found in own], [found.tokens for found in own]
        seconds = {**self._step, **made.seconds}
        # The scheduler's work, and whatever else a step takes, is part of a round as well.
        seconds["commit"] = elapsed - sum(seconds[part] for part in ("draft", "build", "verify", "walk"))
        seconds["verify"] *= self._padding(rows)
        self._planner.learn(made.plan, paths, answers, seconds)

    def _padding(self, rows: Sequence[Row]) -> float:
        """How much longer a verification would take with all trees as large as the largest.

        The policy takes them to be padded so. The engine pads nothing; were it told the shorter times, it would think
        uneven trees cheap and a step without drafts slow.
        """
        assert self._planner.policy is not None
        costs = self._planner.policy.costs
        nodes = [len(row.nodes) - 1 for row in rows]
        if min(nodes) == max(nodes):
            return 1.0
        context = sum(row.base for row in rows) / len(rows)
        # As corrected so far: what the largest trees take must not be told by what smaller ones took.
        below, part = divmod(sum(nodes) / len(nodes), 1)
        less, more = (costs.verify(int(below) + step, len(rows), context) for step in (0, 1))
        return costs.verify(max(nodes), len(rows), context) / (less + part * (more - less))

    def _count(
        self, readers: Sequence[Reader], rows: Sequence[Row], verified: Mapping[str, Verified]
    ) -> None:
        for reader, row in zip(readers, rows, strict=True):
            found = verified.get(reader.name)
            if found is not None:
                arm = OFF if reader.drafted is None else reader.arm
                self.figures.count(len(row.nodes) - 1, len(found.path) - 1, str(arm))
