"""How the rows of a round are drafted for: what each asked for, what the policy makes of it, what there is room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.checks import check_drafting, check_members
from ddtree.drafters import Drafter, DraftRow, behind_of, parts_of
from ddtree.errors import ConfigError
from ddtree.policy import OFF, AutoBudget, AutoMethod, Choice, Policy, Proposals, Request
from ddtree.sampling import Sampler
from ddtree.sequence import Sequence
from ddtree.stats import Clock
from ddtree.tree import DraftTree


def draft_row(tokens: list[int], sampler: Sampler, choice: Choice, depth: int, most: int) -> DraftRow:
    """What a drafter is told of a row.

    Args:
        tokens: of its text, the bonus token last.
        sampler: of its text.
        choice: how it is drafted for.
        depth: how far ahead.
        most: drafted nodes that there is room for.
    """
    return DraftRow(
        tokens,
        min(choice.budget, most),
        depth,
        choice.arm.method == "chain",
        None if sampler.greedy else sampler.noise,
        sampler.params.temperature,
        choice.floor,
        choice.arm.members,
    )


@dataclass(frozen=True)
class Plan:
    """What one round verifies.

    Attributes:
        choices: how each row is drafted for.
        tree: of all rows.
        decided: the policy had a say, and is to learn what came of it.
    """

    choices: list[Choice]
    tree: DraftTree
    decided: bool


class Planner:
    """Asks the policy and the drafter, and tells the policy what came of it.

    Args:
        target: the model drafted for.
        drafter: what proposes; None: nothing is drafted.
        clock: takes the time of the parts of drafting.

    Attributes:
        policy: decides what requests leave open; None while none may leave anything open.
        members: names of the drafters that requests may choose from.
    """

    def __init__(self, target: Any, drafter: Drafter | None, clock: Clock) -> None:
        self.policy: Policy | None = None
        self.members = tuple(part.name for part in parts_of(drafter))
        self._target = target
        self._drafter = drafter
        self._clock = clock

    def request(
        self,
        method: AutoMethod,
        budget: AutoBudget,
        depth: int,
        members: tuple[str, ...] | None,
        sampled: bool,
    ) -> Request:
        """What a sequence asks for, as far as it can be had here. Raises ConfigError."""
        check_drafting(method, budget, depth)
        check_members(members, self.members)
        if self.policy is None and self._drafter is not None and "auto" in (method, budget):
            raise ConfigError("method or budget is auto and the engine has no policy: set Engine.policy")
        drafting = self.members if members is None else tuple(m for m in self.members if m in members)
        if method == "off" or budget == 0 or not drafting:
            method, budget, drafting = "off", 0, ()
        return Request(
            method, budget, drafting, min(depth, self._drafter.max_depth if self._drafter else 0), sampled
        )

    def plan(self, rows: list[Sequence], most: int) -> Plan:
        """The next round of some rows.

        Args:
            rows: the sequences, in the drafter's order.
            most: drafted nodes that there is room for in a row.
        """
        requests = [sequence.request for sequence in rows]
        policy = self.policy if any(request.automatic for request in requests) else None
        if policy is None:
            choices = [request.fixed() for request in requests]
        else:
            contexts = [len(sequence.tokens) - 1 for sequence in rows]
            choices = policy.plan(requests, contexts, [not sequence.stats.rounds for sequence in rows])
        asked = [self._row(*pair, most) for pair in zip(rows, choices, strict=True)]
        tree = self._draft(asked)
        if policy is not None:
            with self._clock("build"):
                # A draft cut short by the end of an answer, or left out, tells little of the drafter.
                behind = behind_of(self._drafter) if any(row.depth for row in asked) else ()
                whole = [
                    choice.arm == OFF or (row.depth == request.depth and index not in behind)
                    for index, (row, choice, request) in enumerate(zip(asked, choices, requests, strict=True))
                ]
                tree = policy.cut(tree, self._proposals, whole)
        return Plan(choices, tree, policy is not None)

    def learn(
        self, plan: Plan, paths: list[list[int]], answers: list[list[int]], seconds: Mapping[str, float]
    ) -> None:
        """Tell the policy what a round came to: each row's accepted path, the tokens chosen along it, the time."""
        if plan.decided:
            assert self.policy is not None
            self.policy.learn(plan.tree, paths, answers, seconds)

    def _row(self, sequence: Sequence, choice: Choice, most: int) -> DraftRow:
        room = self._target.max_context - len(sequence.tokens) - 1
        left = sequence.params.max_tokens - sequence.output_length - 1
        depth = 0 if choice.arm == OFF else max(0, min(sequence.request.depth, room, left))
        return draft_row(sequence.tokens, sequence.sampler, choice, depth, most)

    def _draft(self, asked: list[DraftRow]) -> DraftTree:
        if self._drafter is None or not any(row.depth for row in asked):
            return DraftTree.root([row.tokens[-1] for row in asked], self._target.device)
        return self._drafter.draft(asked, self._clock)

    def _proposals(self) -> Proposals | None:
        """The own trees of several drafters, of the round being made."""
        return getattr(self._drafter, "proposals", None)
