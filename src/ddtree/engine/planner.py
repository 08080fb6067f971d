"""Plan the drafts of a round: what each row asked for, what the policy decides, what there is room for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ddtree.drafters import Drafter, DraftRow, lagging_rows_of, parts_of
from ddtree.errors import ConfigError, PromptError
from ddtree.model import TargetWeights
from ddtree.policy import (
    OFF,
    UNMEASURED_BUDGET,
    AutoBudget,
    AutoMethod,
    Choice,
    Proposals,
    Request,
    unmeasured,
)
from ddtree.policy.controller import Policy
from ddtree.sampling.sampler import Sampler
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree
from ddtree.tree.tree import check_range

_log = logging.getLogger(__name__)


def check_drafting(method: AutoMethod, budget: AutoBudget, depth: int) -> None:
    """Raise ConfigError for an unknown method, or a budget or depth out of range."""
    if method not in ("auto", "off", "chain", "tree"):
        raise ConfigError(f"unknown method {method!r}: choose auto, off, chain or tree")
    if budget != "auto":
        check_range("budget", budget, 0, MAX_BUDGET)
    check_range("depth", depth, 1, MAX_DEPTH)


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


class Text(Protocol):
    """A text to draft for.

    Attributes:
        tokens: prompt and answer so far, the bonus token last.
        request: how to draft for it.
        sampler: chooses its tokens.
    """

    tokens: list[int]
    request: Request
    sampler: Sampler

    @property
    def left(self) -> int:
        """Tokens that may still be chosen."""

    @property
    def fresh(self) -> bool:
        """Whether no round has been decoded yet."""


@dataclass(frozen=True)
class Plan:
    """The drafts of one round.

    Attributes:
        choices: how each row is drafted for.
        tree: of all rows.
        decided: the policy decided, and is to learn the outcome.
    """

    choices: list[Choice]
    tree: DraftTree
    decided: bool


class Planner:
    """Asks the policy and the drafter for the drafts of a round, and tells the policy the outcome.

    Args:
        target: the model to draft for.
        drafter: proposes; None to draft nothing.
        clock: times the parts of drafting.

    Attributes:
        policy: decides for requests with "auto"; None while there may be no such requests.
        members: names of the drafters that requests may choose from.
    """

    def __init__(self, target: TargetWeights, drafter: Drafter | None, clock: Clock) -> None:
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
        members: tuple[str, ...] | None = None,
        sampled: bool = False,
    ) -> Request:
        """Make a request of what a sequence asks for, limited to what this drafter can do.

        Without a policy "auto" stands for fixed values (`unmeasured`).

        Args:
            sampled: the sequence's temperature is above 0.

        Raises:
            ConfigError: an argument is out of range, or names no drafter of this engine.
        """
        check_drafting(method, budget, depth)
        for name in members or ():
            if name not in self.members:
                known = ", ".join(self.members) or "none"
                raise ConfigError(f"unknown drafter {name!r} in members: this engine's are {known}")
        if self.policy is None:
            method, budget = unmeasured(method, budget)
        drafting = self.members if members is None else tuple(m for m in self.members if m in members)
        if method == "off" or budget == 0 or not drafting:
            method, budget, drafting = "off", 0, ()
        return Request(
            method, budget, drafting, min(depth, self._drafter.max_depth if self._drafter else 0), sampled
        )

    def plan(self, rows: Sequence[Text], most: int, places: Sequence[int] | None = None) -> Plan:
        """Draft for the next round of some rows.

        Args:
            rows: the texts of all of the drafter's rows, in its order.
            most: most drafted nodes of a row, for which there is room in the cache.
            places: the rows that take part, at least one; all by default.
        """
        places = range(len(rows)) if places is None else places
        asked = [rows[place] for place in places]
        requests = [text.request for text in asked]
        choices = [request.fixed() for request in requests]
        policy = self.policy if any(request.automatic for request in requests) else None
        if policy is not None:
            contexts = [len(text.tokens) - 1 for text in asked]
            with self._guarded():
                choices = policy.plan(requests, contexts, [text.fresh for text in asked])
            policy = self.policy
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
                # A draft that is cut short by the end of an answer, or left out, says little about the drafter.
                lagging = lagging_rows_of(drafter)
                whole = [
                    choice.arm == OFF or (drafts[place].depth == request.depth and place not in lagging)
                    for place, choice, request in zip(places, choices, requests, strict=True)
                ]
                with self._guarded():
                    tree = policy.cut(tree, lambda: self._proposals(places), whole)
        return Plan(choices, tree, policy is not None)

    def learn(
        self, plan: Plan, paths: list[list[int]], answers: list[list[int]], seconds: Mapping[str, float]
    ) -> None:
        """Tell the policy the outcome of a round: each row's accepted path, the tokens chosen along it, the time."""
        if plan.decided and self.policy is not None:
            with self._guarded():
                self.policy.learn(plan.tree, paths, answers, seconds)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Go on without a policy that raises: it decides about speed only."""
        try:
            yield
        except Exception as error:
            self.policy = None
            _log.warning(
                "auto cannot decide any more, and drafts trees of %s nodes: %s", UNMEASURED_BUDGET, error
            )

    def _row(self, text: Text, choice: Choice, most: int) -> DraftRow:
        if choice.arm == OFF or most < 1:
            return DraftRow(text.tokens, 0, 0)
        room = self._target.max_context - len(text.tokens) - 1
        return DraftRow(
            text.tokens,
            min(choice.budget, most),
            max(0, min(text.request.depth, room, text.left - 1)),
            choice.arm.method == "chain",
            None if text.sampler.params.greedy else text.sampler.noise,
            text.sampler.params.temperature,
            members=choice.arm.members,
        )

    def _proposals(self, places: Sequence[int]) -> Proposals | None:
        """Return the trees of each single drafter for the round being planned, by name; None for a single drafter."""
        found: Proposals | None = getattr(self._drafter, "proposals", None)
        return found and [(name, _rows(tree, places)) for name, tree in found]


def _rows(tree: DraftTree, places: Sequence[int]) -> DraftTree:
    """Select some rows of a batch of trees."""
    if list(places) == list(range(len(tree.sizes))):
        return tree
    return DraftTree.stack([tree.row(place) for place in places])
