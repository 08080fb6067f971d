"""What `auto` does: for each round which arm, how many nodes, and what the round taught."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.policy.acceptance import Acceptance
from ddtree.policy.arms import OFF, Arm, AutoBudget, AutoMethod, arms_for
from ddtree.policy.budget import best_width, gains
from ddtree.policy.controller import Controller, Made
from ddtree.policy.costs import Costs, marked
from ddtree.policy.foretell import outcome
from ddtree.policy.latency import LatencyModel
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, merge

Proposals = Sequence[tuple[str, DraftTree]]

_LEAST_CAP = 8
_FIRST_CAP = 16
_KINDS = 256  # of requests, under loads, that have a controller of their own
_SAFE = 0.7  # a drafter's probability may be too low by so much
_FREE = 0.03  # of verifying the root alone: a drafter that takes no more drafts in every tree


@dataclass(frozen=True)
class Choice:
    """How a row is drafted this round: with this arm, and at most so many nodes, of this log-probability or more."""

    arm: Arm
    budget: int
    floor: float = -math.inf


@dataclass(frozen=True)
class Request:
    """What a row asked for.

    Attributes:
        method: "auto" or a fixed one.
        budget: "auto" or a fixed one.
        members: names of the drafters that may draft for it.
        depth: most depth of its drafts.
        sampled: its temperature is above 0.
    """

    method: AutoMethod
    budget: AutoBudget
    members: tuple[str, ...]
    depth: int = MAX_DEPTH
    sampled: bool = False

    @property
    def automatic(self) -> bool:
        return self.method == "auto" or self.budget == "auto"

    def fixed(self) -> Choice:
        """How to draft for a request that leaves nothing to decide."""
        assert self.method != "auto" and self.budget != "auto"
        return Choice(OFF if self.method == "off" else Arm(self.method, self.members), self.budget)


class Policy:
    """Decides for the rows of an engine; every row's text is the same whatever it decides.

    Args:
        latency: seconds of the parts of a round.
        acceptance: what is known of acceptance, by arm; learnt from nothing by default.
    """

    def __init__(self, latency: LatencyModel, acceptance: Mapping[str, Acceptance] | None = None) -> None:
        self.latency = latency
        self.costs = Costs(latency)
        self.acceptance = dict(acceptance or {})
        self._groups: dict[tuple[Request, int], _Group] = {}
        self._round: _Round | None = None
        self._drafted: frozenset[str] = frozenset()  # the drafters of the last round

    def plan(
        self, requests: Sequence[Request], contexts: Sequence[int], fresh: Sequence[bool] = ()
    ) -> list[Choice]:
        """The arm and the most nodes of each row.

        Args:
            requests: of each row.
            contexts: committed tokens of each row.
            fresh: which rows are in their first round; none by default.
        """
        load = _load(len(requests))
        context = sum(contexts) / len(contexts)
        groups = {
            request: self._group(request, load, len(requests), context)
            for request in dict.fromkeys(requests)
            if request.automatic
        }
        for request, new in zip(requests, fresh, strict=False):
            if new and request in groups:
                groups[request].controller.renew(1 / len(requests))
        chosen = {request: group.choose() for request, group in groups.items()}
        choices = [chosen.get(request) or request.fixed() for request in requests]
        self._round = _Round(list(requests), choices, groups, context, any(fresh))
        return choices

    def cut(
        self,
        tree: DraftTree,
        proposals: Callable[[], Proposals | None] | None = None,
        whole: Sequence[bool] = (),
    ) -> DraftTree:
        """The tree of the round planned last, each automatic row cut to the nodes that pay.

        Args:
            tree: as drafted.
            proposals: gives name and own tree of each drafter, where `tree` is made of several; called in some
                rounds only, before `learn` returns.
            whole: which rows could be drafted for as deep as they ask; all by default.
        """
        now = self._round
        assert now is not None
        now.whole = whole or [True] * len(tree.sizes)
        now.sizes = list(tree.sizes)
        widest = max(tree.sizes)
        if widest == 1:
            return tree
        names = _names(choice.arm for choice in now.choices)
        now.proposals = lambda: (proposals and proposals()) or [(names[0], tree)]
        now.read(tree)
        probabilities = np.stack([self._probabilities(now, row) for row in range(len(now.requests))])
        open_rows = [row for row, request in enumerate(now.requests) if request.budget == "auto"]
        if not open_rows:
            now.expected = (1 + probabilities.sum(axis=1)).tolist()
            return tree
        # By what came true lately: the counts behind the probabilities follow a change of text slowly.
        truths = np.array([now.truth(row) for row in range(len(now.requests))])
        expected = gains(truths[:, None] * probabilities)
        # What has a fixed budget is verified whatever the others do.
        least = max((size for row, size in enumerate(tree.sizes) if row not in open_rows), default=1) - 1
        seconds = self.costs.rounds(widest - 1, len(tree.sizes), now.context, names, now.sampled)
        rate = now.rate()
        width = least + best_width(expected[least:], seconds[least:], rate)
        budgets = [
            min(width, size - 1) if row in open_rows else size - 1 for row, size in enumerate(tree.sizes)
        ]
        now.expected = (1 + probabilities[:, :width].sum(axis=1)).tolist()
        least_gain = 0.0
        if rate is not None and len(seconds) > 2:
            least_gain = _SAFE * rate * float(np.diff(seconds[1:]).min()) / len(tree.sizes)
        floor = math.log(least_gain) if least_gain > 0 else -math.inf
        for row in open_rows:
            now.groups[now.requests[row]].chosen(width, floor)
        return tree.truncate(budgets)

    def learn(
        self,
        tree: DraftTree,
        paths: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        seconds: Mapping[str, float],
    ) -> None:
        """What the round planned last came to.

        Args:
            tree: as verified.
            paths: the accepted path of each row.
            answers: the tokens that the target chose along it.
            seconds: of the parts of this round, as in `ddtree.stats.PARTS`.
        """
        now, self._round = self._round, None
        assert now is not None
        rows, width = len(paths), max(tree.sizes)
        names = _names(choice.arm for choice in now.choices)
        # A drafter that paused, or has a prompt before it, first takes in what was committed meanwhile: such a round
        # tells only that others take no longer.
        settled = self._drafted.issuperset(names) and not now.fresh
        self._drafted = frozenset(names)
        self._time(now, names, rows, width, seconds, settled)
        for request, group in now.groups.items():
            mine = [row for row, asked in enumerate(now.requests) if asked == request and now.whole[row]]
            if not mine:
                continue
            arm = now.choices[mine[0]].arm
            tokens = sum(len(paths[row]) for row in mine) / len(mine)
            nodes = sum(tree.sizes[row] - 1 for row in mine) / len(mine)
            foretold = self._foretold(now, group.controller, mine, answers)
            expected = sum(now.expected[row] for row in mine) / len(mine) if now.expected else None
            group.controller.learn(arm, Made(tokens, nodes, expected), foretold)
            if arm != OFF:
                for row in mine:
                    self._acceptance(arm, request).play(tree.sizes[row] - 1, len(paths[row]) - 1)
            if len(mine) == rows:
                predicted = self.costs.round(width - 1, rows, now.context, arm.members, now.sampled)
                ratio = sum(seconds[part] for part in _ROUND) / predicted
                if settled or ratio < 1:
                    group.controller.time(arm, ratio)
        if width > 1:
            self._accept(now, tree, paths)

    def _foretold(
        self, now: _Round, controller: Controller, rows: Sequence[int], answers: Sequence[Sequence[int]]
    ) -> dict[Arm, Made]:
        """What the other arms would have made, each with the nodes that pay for it."""
        played = now.choices[rows[0]].arm
        if not controller.curious(played):
            return {}
        foretold = {}
        proposed = dict(now.proposals())
        for arm in controller.figures:
            if arm in (OFF, played) or not set(now.choices[rows[0]].arm.members).issuperset(arm.members):
                continue
            trees = [proposed[name] for name in arm.members if name in proposed]
            if not trees:
                foretold[arm] = Made(1.0, 0.0, 1.0)
                continue
            budgets = [choice.budget for choice in now.choices]
            tree = trees[0] if len(trees) == 1 else merge(trees, budgets)
            outcomes = [outcome(tree, row, answers[row], arm.method == "chain") for row in rows]
            known = self._acceptance(arm, now.requests[rows[0]])
            widest = max(len(own.depths) for own in outcomes)
            probabilities = np.zeros((len(rows), widest))
            for own, line in zip(outcomes, probabilities, strict=True):
                line[: len(own.depths)] = known.calibrated(own.logprobs, own.depths)
                known.learn(own.logprobs, own.depths, own.accepted)
            expected = gains(probabilities)
            width = widest
            if now.requests[rows[0]].budget == "auto":
                seconds = self.costs.rounds(widest, len(rows), now.context, arm.members, now.sampled)
                believed = gains(controller.figures[arm].truth * probabilities)
                width = best_width(believed, seconds, now.rate())
            made = sum(1 + int(own.accepted[:width].sum()) for own in outcomes) / len(rows)
            nodes = sum(min(width, len(own.depths)) for own in outcomes) / len(rows)
            foretold[arm] = Made(made, nodes, float(expected[width]) / len(rows))
        return foretold

    def state(self) -> dict[str, Any]:
        """What it knows and did, as plain JSON values: each kind of request under each load."""
        return {
            "groups": [
                {
                    "method": request.method,
                    "budget": request.budget,
                    "members": list(request.members),
                    "depth": request.depth,
                    "sampled": request.sampled,
                    "rows": load,
                    **group.controller.state(),
                }
                for (request, load), group in self._groups.items()
            ],
            "acceptance_seen": {name: acceptance.seen for name, acceptance in self.acceptance.items()},
        }

    def _group(self, request: Request, load: int, rows: int, context: float) -> _Group:
        key = (request, load)
        if key not in self._groups:
            free = self._free(request, rows, context)
            arms = arms_for(request.method, request.members, free, request.budget)
            self._groups[key] = _Group(self, request, arms, load)
            self._groups[key].controller.recall(
                {
                    arm: known
                    for arm in arms
                    if (known := self.acceptance.get(_named(arm, request))) is not None
                }
            )
        # Clients may ask in any number of ways: the kinds that were asked for last are kept.
        group = self._groups[key] = self._groups.pop(key)
        if len(self._groups) > _KINDS:
            del self._groups[next(iter(self._groups))]
        group.rows, group.context = rows, context
        return group

    def _free(self, request: Request, rows: int, context: float) -> list[str]:
        """The drafters that cost next to nothing."""
        least = _FREE * self.costs.verify(0, rows, context)
        draft = self.costs.draft
        return [
            name
            for name in request.members
            if draft(_LEAST_CAP, rows, context, (name,), request.sampled) < least
        ]

    def _probabilities(self, now: _Round, row: int) -> NDArray[np.float64]:
        """float64 [N - 1]: calibrated, of the nodes besides the root; 0 for padding."""
        assert now.logprobs is not None and now.depths is not None
        logprobs, depths = now.logprobs[row, 1:], now.depths[row, 1:]
        known = self._acceptance(now.choices[row].arm, now.requests[row])
        values = known.calibrated(logprobs, depths)
        values[now.sizes[row] - 1 :] = 0
        return values

    def _acceptance(self, arm: Arm, request: Request) -> Acceptance:
        name = _named(arm, request)
        if name not in self.acceptance:
            self.acceptance[name] = Acceptance()
        return self.acceptance[name]

    def _accept(self, now: _Round, tree: DraftTree, paths: Sequence[Sequence[int]]) -> None:
        if now.logprobs is None:
            now.read(tree)
        assert now.logprobs is not None and now.depths is not None
        for row, path in enumerate(paths):
            size = tree.sizes[row]
            if size == 1:
                continue
            accepted = np.zeros(size, dtype=np.bool_)
            accepted[list(path)] = True
            self._acceptance(now.choices[row].arm, now.requests[row]).learn(
                now.logprobs[row, 1:size], now.depths[row, 1:size], accepted[1:]
            )

    def _time(
        self,
        now: _Round,
        names: Sequence[str],
        rows: int,
        width: int,
        seconds: Mapping[str, float],
        settled: bool,
    ) -> None:
        self.costs.verified(width - 1, rows, now.context, seconds["verify"])
        observe = self.latency.observe
        if names and all(now.whole):
            predicted = self.costs.draft(max(now.sizes) - 1, rows, now.context, names, now.sampled)
            drafted = seconds["draft"] + seconds["build"]
            if settled or drafted < predicted:
                observe("draft", predicted, drafted, marked(names, now.sampled))
        observe("overhead", self.latency.overhead(), seconds["walk"] + seconds["commit"])


_ROUND = ("draft", "build", "verify", "walk", "commit")


class _Group:
    """Rows of one kind under one load: their controller, and how large a tree is worth drafting."""

    def __init__(self, policy: Policy, request: Request, arms: Sequence[Arm], load: int) -> None:
        self.rows, self.context = 1, 0.0
        self._fixed = None if request.budget == "auto" else request.budget
        self._cap = _FIRST_CAP
        self._lately = 0.0
        self._floor = -math.inf
        self.controller = Controller(
            arms,
            lambda arm, nodes: policy.costs.round(
                round(nodes), self.rows, self.context, arm.members, request.sampled
            ),
            load,
        )

    def choose(self) -> Choice:
        arm = self.controller.choose()
        if arm == OFF:
            return Choice(OFF, 0)
        return Choice(arm, self._cap, self._floor) if self._fixed is None else Choice(arm, self._fixed)

    def chosen(self, width: int, floor: float) -> None:
        """A tree should be drafted somewhat larger than those that pay, no more: building it costs time."""
        self._floor = floor
        self._lately = max(float(width), self._lately + (width - self._lately) * 0.1)
        self._cap = min(MAX_BUDGET, max(_LEAST_CAP, round(self._lately * 1.25) + 2))


@dataclass
class _Round:
    """A round between its plan and its lesson."""

    requests: list[Request]
    choices: list[Choice]
    groups: dict[Request, _Group]
    context: float
    fresh: bool
    proposals: Callable[[], Proposals] = tuple
    expected: Sequence[float] = ()
    sizes: Sequence[int] = (1,)
    whole: Sequence[bool] = ()
    logprobs: NDArray[np.float32] | None = None
    depths: NDArray[np.int64] | None = None

    def read(self, tree: DraftTree) -> None:
        """Keep a tree's columns as arrays."""
        self.logprobs, self.depths = tree.logprobs.cpu().numpy(), tree.depths.cpu().numpy()

    @property
    def sampled(self) -> bool:
        return any(request.sampled for request in self.requests)

    def truth(self, row: int) -> float:
        """How far the probabilities of a row's arm have come true lately."""
        group = self.groups.get(self.requests[row])
        return 1.0 if group is None else group.controller.figures[self.choices[row].arm].truth

    def rate(self) -> float | None:
        """Tokens per second of all rows at the going rates; None while one of them is unknown."""
        rates = [group.controller.rate() for group in self.groups.values()]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) * len(self.requests) if len(known) == len(rates) else None


def _named(arm: Arm, request: Request) -> str:
    """What an arm's acceptance goes by: noise makes another drafter of it."""
    return f"{arm}, {'sampled' if request.sampled else 'greedy'}"


def _names(arms: Any) -> list[str]:
    return list(dict.fromkeys(name for arm in arms for name in arm.members))


def _load(rows: int) -> int:
    """Loads are told apart by powers of two: 1, 2, 3-4, 5-8, ... rows, each named by its largest."""
    return 1 << (rows - 1).bit_length()
