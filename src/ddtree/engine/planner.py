"""How the rows of a round are drafted for: what each asked for, what the policy makes of it, what there is room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ddtree.drafters import Drafter, DraftRow, behind_of, parts_of
from ddtree.errors import ConfigError, PromptError
from ddtree.policy import OFF, UNMEASURED_BUDGET, AutoBudget, AutoMethod, Choice, Proposals, Request
from ddtree.policy.controller import Policy
from ddtree.sampling.sampler import Sampler
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree


def check_drafting(method: AutoMethod, budget: AutoBudget, depth: int) -> None:
    """Raise ConfigError for what is unknown or out of range."""
    if method not in ("auto", "off", "chain", "tree"):
        raise ConfigError(f"unknown method {method!r}: choose auto, off, chain or tree")
    if isinstance(budget, str):
        if budget != "auto":
            raise ConfigError(f"budget={budget!r} is neither a number nor auto")
    elif not 0 <= budget <= MAX_BUDGET:
        raise ConfigError(f"budget={budget} is outside 0..{MAX_BUDGET}")
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"depth={depth} is outside 1..{MAX_DEPTH}")


def check_members(members: tuple[str, ...] | None, known: tuple[str, ...]) -> None:
    """Raise ConfigError for the name of a drafter that is not there."""
    for name in members or ():
        if name not in known:
            raise ConfigError(
                f"unknown drafter {name!r} in members: this engine's are {', '.join(known) or 'none'}"
            )


def check_prompt(prompt: list[int], vocab_size: int, max_context: int) -> None:
    """Raise PromptError for a prompt that is empty, holds unknown ids, or leaves no room in the context."""
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if len(prompt) >= max_context:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the context holds {max_context}: shorten it to "
            f"{max_context - 1} or less"
        )
    bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise PromptError(f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}")


def unmeasured(method: AutoMethod, budget: AutoBudget) -> tuple[AutoMethod, AutoBudget]:
    """What "auto" stands for where there is no policy to decide."""
    return "tree" if method == "auto" else method, UNMEASURED_BUDGET if budget == "auto" else budget


class Text(Protocol):
    """A text that is drafted for.

    Attributes:
        tokens: all of it, the bonus token last.
        request: how it asks to be drafted for.
        sampler: of its tokens.
    """

    tokens: list[int]
    request: Request
    sampler: Sampler

    @property
    def left(self) -> int:
        """Tokens that may still be chosen."""

    @property
    def fresh(self) -> bool:
        """Whether it was in no round yet."""


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

    def plan(self, rows: Sequence[Text], most: int, places: Sequence[int] | None = None) -> Plan:
        """The next round of some rows.

        Args:
            rows: the texts of all of the drafter's rows, in its order.
            most: drafted nodes that there is room for in a row.
            places: the rows that take part, at least one; all by default.
        """
        places = range(len(rows)) if places is None else places
        asked = [rows[place] for place in places]
        requests = [text.request for text in asked]
        policy = self.policy if any(request.automatic for request in requests) else None
        if policy is None:
            choices = [request.fixed() for request in requests]
        else:
            contexts = [len(text.tokens) - 1 for text in asked]
            choices = policy.plan(requests, contexts, [text.fresh for text in asked])
        drafts = [DraftRow(text.tokens, 0, 0) for text in rows]
        for place, choice in zip(places, choices, strict=True):
            drafts[place] = self._row(rows[place], choice, most)
        drafter = self._drafter if any(row.depth for row in drafts) else None
        if drafter is None:
            tree = DraftTree.root([text.tokens[-1] for text in asked], self._target.device)
        else:
            tree = _rows(drafter.draft(drafts, self._clock), places)
        if policy is not None:
            with self._clock("build"):
                # A draft cut short by the end of an answer, or left out, tells little of the drafter.
                behind = behind_of(drafter)
                whole = [
                    choice.arm == OFF or (drafts[place].depth == request.depth and place not in behind)
                    for place, choice, request in zip(places, choices, requests, strict=True)
                ]
                tree = policy.cut(tree, lambda: self._proposals(places), whole)
        return Plan(choices, tree, policy is not None)

    def learn(
        self, plan: Plan, paths: list[list[int]], answers: list[list[int]], seconds: Mapping[str, float]
    ) -> None:
        """Tell the policy what a round came to: each row's accepted path, the tokens chosen along it, the time."""
        if plan.decided:
            assert self.policy is not None
            self.policy.learn(plan.tree, paths, answers, seconds)

    def _row(self, text: Text, choice: Choice, most: int) -> DraftRow:
        # A depth of 0 also tells the policy that the drafter had no chance.
        if choice.arm == OFF or most < 1:
            return DraftRow(text.tokens, 0, 0)
        room = self._target.max_context - len(text.tokens) - 1
        return DraftRow(
            text.tokens,
            min(choice.budget, most),
            max(0, min(text.request.depth, room, text.left - 1)),
            choice.arm.method == "chain",
            None if text.sampler.greedy else text.sampler.noise,
            text.sampler.params.temperature,
            members=choice.arm.members,
        )

    def _proposals(self, places: Sequence[int]) -> Proposals | None:
        """The own trees of several drafters, of the round being made."""
        found: Proposals | None = getattr(self._drafter, "proposals", None)
        return found and [(name, _rows(tree, places)) for name, tree in found]


def _rows(tree: DraftTree, places: Sequence[int]) -> DraftTree:
    """Some rows of a batch of trees."""
    if list(places) == list(range(len(tree.sizes))):
        return tree
    return DraftTree.stack([tree.row(place) for place in places])
