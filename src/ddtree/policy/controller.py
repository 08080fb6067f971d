"""Decides for each round which drafters draft and how many nodes are verified, and learns from what came of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddtree.policy.acceptance import Acceptance
from ddtree.policy.latency import Array, LatencyTable, batch_class
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree, following, walk

Method = Literal["off", "chain", "tree"]
AutoMethod = Literal["auto", "off", "chain", "tree"]
AutoBudget = int | Literal["auto"]
Proposals = Sequence[tuple[str, DraftTree]]
"""Name and own tree of each of several drafters."""

UNMEASURED_BUDGET = 16
"""Nodes of a tree where the budget is "auto" and nothing was measured."""
# Most of the rounds that go to another arm. Half: a change of text is found half as soon; double: twice the cost of it.
EXPLORATION = 0.03
# Least lead of an arm that is switched to. 1.015 costs 1.1 % of auto's tokens per second on the replay at T=0 (more
# switches by luck); 1.06 changes none of its rows by more than 0.7 %.
MARGIN = 1.03
# Rounds between switches. 0 costs 1.0 % on the replay at T=1; double: a useless drafter stays twice as long.
DWELL = 8
# Rounds that the present tokens per round look back. 24 and 96 change the replay by -0.2 to 0.7 %.
LEVEL_MEMORY = 48.0
# Rounds over which arms are compared and probabilities held against what came. Half: luck moves them more; double: a
# change of text is followed later.
COMPARE_MEMORY = 128.0
# Each of the first 64 rounds of all drafters is compared, then every fourth, since each drafter's own tree takes time
# to build. Comparing every fourth alone changes the replay by -0.5 to 0.4 %.
COMPARE_ALWAYS = 64
COMPARE_EVERY = 4
# Accepted tokens that are taken to have come as promised. Half: one poor round cuts trees more; double: a boastful
# drafter is believed longer.
RATIO_PRIOR = 2.0
# Rounds of the root alone to try at first. Half: its cost rests on two rounds, less than half a window; double: four
# more rounds of one token.
OFF_PROBES = 4
# Most nodes of the first tree, and fewest to draft later. They cost drafting time alone: double, and trees take longer
# to build; half, and a flat cost curve is climbed more slowly.
FIRST_CAP = 16
LEAST_CAP = 8
# A node is drafted whose probability is this share of what pays. Double: nodes that calibration would raise are left
# out; half: more nodes are built in vain.
FLOOR = 0.7
# Kinds of requests that are remembered: half, and rare kinds start anew sooner; double, twice the memory.
MAX_CONTROLLERS = 256


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    Attributes:
        method: "off" (autoregressive), "chain" or "tree".
        members: names of the drafters that draft, in the drafter's order; none with "off".
    """

    method: Method
    members: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.method if self.method == "off" else f"{self.method}@{'+'.join(self.members)}"


OFF = Arm("off")


@dataclass(frozen=True)
class Choice:
    """How a row is drafted this round.

    Attributes:
        arm: the drafters.
        budget: most nodes, e.g. 12.
        floor: least log-probability of a node.
    """

    arm: Arm
    budget: int
    floor: float = -math.inf


@dataclass(frozen=True)
class Request:
    """How a row asks to be drafted for.

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
        """Return how to draft for a request that leaves nothing to decide."""
        assert self.method != "auto" and self.budget != "auto"
        return Choice(OFF if self.method == "off" else Arm(self.method, self.members), self.budget)


def arms_of(request: Request) -> list[Arm]:
    """Return the arms of a request: all its drafters first, then, with "auto", each alone, and last "off"."""
    if request.method == "off" or not request.members:
        return [OFF]
    if request.method != "auto":
        return [Arm(request.method, request.members), OFF]
    alone = [Arm("tree", (name,)) for name in request.members]
    return list(dict.fromkeys([Arm("tree", request.members), *alone, OFF]))


def best_width(chances: Array, seconds: Array, rate: float | None, least: int = 0) -> int:
    """Return the number of nodes a row, `least`..n, that serves throughput best; the smallest of equals.

    A round is worth its tokens less what its time would earn at the going rate: rounds chosen so make the most tokens
    per second in the long run (Dinkelbach's rule for a ratio of sums). Without a rate the round's own ratio is
    maximized (CaDDTree, arXiv 2606.01813; BASTION, arXiv 2605.29727).

    Args:
        chances: float64 [R, n], probability of each node to be accepted, in the tree's order; 0 for padding.
        seconds: float64 [n + 1], of the whole round with 0..n nodes a row.
        rate: tokens per second that rounds of all rows make at present; None where unknown.
        least: fewest nodes.
    """
    expected = len(chances) + np.concatenate([[0.0], chances.sum(axis=0).cumsum()])
    worth = expected / seconds if rate is None else expected - rate * seconds
    return least + int(worth[least:].argmax())


@dataclass
class ArmStats:
    """Figures of an arm.

    Attributes:
        rounds: rounds decoded with it.
        tokens: tokens a row and round, as expected now.
        nodes: drafted nodes a row, an exponential mean.
        compared: rounds in which it was compared with all drafters, old ones in part.
    """

    rounds: int = 0
    tokens: float = 1.0
    nodes: float = 0.0
    compared: float = 0.0
    _drafts: float = 0.0
    _accepted: float = 0.0
    _promised: float = 0.0

    @property
    def ratio(self) -> float:
        """Calibration ratio: accepted tokens over those that calibrated probabilities promised, lately."""
        return (self._accepted + RATIO_PRIOR) / (self._promised + RATIO_PRIOR)

    def observe(self, tokens: float, nodes: float, expected: float) -> float:
        """Take in a round's figures a row; return `expected` times `ratio`, which scatters less than `tokens`."""
        self._drafts = min(self._drafts + 1, LEVEL_MEMORY)
        self.nodes += (nodes - self.nodes) / self._drafts
        keep = 1 - 1 / COMPARE_MEMORY
        self._accepted = self._accepted * keep + tokens - 1
        self._promised = self._promised * keep + expected - 1
        return 1 + (expected - 1) * self.ratio


@dataclass(frozen=True)
class Switch:
    """A change of arm: when (round), from which to which, and why."""

    round: int
    before: str
    after: str
    reason: str


class Controller:
    """Chooses arm and budget for the rows of one kind of request under one load.

    A round of all drafters shows what each of them alone would have made, since the answer is then known. Arms are so
    compared on the same rounds. A change of the text is seen by the arm in use, and believed of the others too.

    Args:
        request: how the rows ask to be drafted for.
        seconds: predicts the seconds of a round of an arm with so many nodes a row.
    """

    def __init__(self, request: Request, seconds: Callable[[Arm, float], float]) -> None:
        self.stats = {arm: ArmStats() for arm in arms_of(request)}
        self.current = self._full = next(iter(self.stats))
        self.rounds = self.explored = 0
        self.switches: deque[Switch] = deque(maxlen=64)
        self._request = request
        self._seconds = seconds
        self._switched = 0
        self._heard = self._allowance = 0.0
        self._cap, self._lately, self._floor = FIRST_CAP, 0.0, -math.inf

    def choose(self) -> Choice:
        """Return how the next round is drafted."""
        self.rounds += 1
        self._maybe_switch()
        arm = self.current
        self._allowance = min(1.0, self._allowance + EXPLORATION)
        if self._allowance >= 1 and (probe := self._next_probe()) != arm:
            arm, self._allowance = probe, 0.0
            self.explored += 1
        if arm == OFF:
            return Choice(OFF, 0)
        if self._request.budget != "auto":
            return Choice(arm, self._request.budget)
        return Choice(arm, self._cap, self._floor)

    def learn(self, arm: Arm, tokens: float, others: Mapping[Arm, float]) -> None:
        """Learn the tokens a row of a round, and those that other arms would have made, where they are known.

        All arms move with the arm in use; those that are compared also by themselves, and more slowly.
        """
        self.stats[arm].rounds += 1
        if arm == OFF:
            return
        self._heard += 1
        weight = max(1 / self._heard, 1 / LEVEL_MEMORY)
        change = 1 + (tokens / self.stats[arm].tokens - 1) * weight
        for known in self.stats.values():
            known.tokens *= change
        if arm == self._full:
            for own in (self.stats[arm], *(self.stats[other] for other in others)):
                own.compared = min(own.compared + 1, COMPARE_MEMORY)
            for other, made in others.items():
                own = self.stats[other]
                level = self.stats[arm].tokens
                own.tokens += (made * level / tokens - own.tokens) / own.compared

    def should_compare(self, played: Arm) -> bool:
        """Return whether a round of that arm is to show what other arms would have made of it."""
        few = self.stats[self._full].compared < COMPARE_ALWAYS
        return played == self._full and len(self.stats) > 2 and (few or self.rounds % COMPARE_EVERY == 0)

    def chosen(self, width: int, floor: float) -> None:
        """Note how many nodes paid: somewhat more are drafted next, and none below the floor, since building costs."""
        self._floor = floor
        self._lately = max(float(width), self._lately + (width - self._lately) * 0.1)
        self._cap = min(MAX_BUDGET, max(LEAST_CAP, round(self._lately * 1.25) + 2))

    def tokens(self, arm: Arm) -> float:
        """Return the tokens a row and round that an arm is expected to make now."""
        return 1.0 if arm == OFF else max(1.0, self.stats[arm].tokens)

    def speed(self, arm: Arm) -> float:
        """Return the tokens a row and second that an arm is expected to make now."""
        return self.tokens(arm) / self._seconds(arm, self.stats[arm].nodes)

    def rate(self) -> float | None:
        """Return the tokens a row and second of the arm in use; None while it is unknown."""
        return self.speed(self.current) if self._known(self.current) else None

    def state(self) -> dict[str, Any]:
        """Return its figures as plain JSON values."""
        return {
            "arm": str(self.current),
            "rounds": self.rounds,
            "explored": self.explored,
            "arms": {
                str(arm): {
                    "rounds": stats.rounds,
                    "tokens_per_round": self.tokens(arm),
                    "nodes": stats.nodes,
                    "tokens_per_second": self.speed(arm) if self._known(arm) else None,
                }
                for arm, stats in self.stats.items()
            },
            "switches": [asdict(switch) for switch in self.switches],
        }

    def _known(self, arm: Arm) -> bool:
        return arm == OFF or self.stats[arm].compared >= 1

    def _next_probe(self) -> Arm:
        """Return the arm to explore: all drafters, but "off" while its time is hardly known."""
        return OFF if self.stats[OFF].rounds < OFF_PROBES else self._full

    def _maybe_switch(self) -> None:
        if self.rounds - self._switched <= DWELL or not self._known(self.current):
            return
        best = max(filter(self._known, self.stats), key=self.speed)
        ours, theirs = self.speed(self.current), self.speed(best)
        if theirs > ours * MARGIN:
            reason = f"{theirs:.1f} against {ours:.1f} tokens a second a row"
            self.switches.append(Switch(self.rounds, str(self.current), str(best), reason))
            self.current, self._switched = best, self.rounds


@dataclass
class _Round:
    """A round between its plan and its result."""

    requests: Sequence[Request]
    choices: list[Choice]
    controllers: dict[Request, Controller]
    rate: float | None
    context: float
    fresh: bool
    tree: DraftTree | None = None
    whole: Sequence[bool] = ()
    expected: Sequence[float] = ()
    proposals: Callable[[], Proposals | None] | None = None

    @property
    def names(self) -> list[str]:
        """Names of all drafters that draft in it."""
        return list(dict.fromkeys(name for choice in self.choices for name in choice.arm.members))

    @property
    def costs(self) -> tuple[int, float, bool]:
        """Rows, context, and whether one of them samples."""
        return len(self.requests), self.context, any(request.sampled for request in self.requests)


class Policy:
    """Decides for the rows of an engine; every row's text is the same whatever it decides.

    A round is planned (`plan`), its tree cut to the nodes that pay (`cut`), and its result learnt (`learn`), in this
    order.

    Args:
        latency: seconds of the parts of a round.
        acceptance: known acceptance by arm; nothing by default.
    """

    def __init__(self, latency: LatencyTable, acceptance: Mapping[str, Acceptance] | None = None) -> None:
        self.latency = latency
        self.acceptance = dict(acceptance or {})
        self._controllers: dict[tuple[Request, int], Controller] = {}
        self._context = 0.0
        self._round: _Round | None = None
        self._drafted: frozenset[str] = frozenset()

    def plan(
        self, requests: Sequence[Request], contexts: Sequence[int], fresh: Sequence[bool] = ()
    ) -> list[Choice]:
        """Return the arm and the most nodes of each row.

        Args:
            requests: of each row.
            contexts: committed tokens of each row.
            fresh: which rows are in their first round; none by default.
        """
        self._context = sum(contexts) / len(contexts)
        own = {r: self._controller(r, len(requests)) for r in dict.fromkeys(requests) if r.automatic}
        chosen = {request: controller.choose() for request, controller in own.items()}
        choices = [chosen.get(request) or request.fixed() for request in requests]
        rates = [rate for controller in own.values() if (rate := controller.rate()) is not None]
        rate = sum(rates) / len(rates) * len(requests) if rates and len(rates) == len(own) else None
        self._round = _Round(requests, choices, own, rate, self._context, any(fresh))
        return choices

    def cut(
        self,
        tree: DraftTree,
        proposals: Callable[[], Proposals | None] | None = None,
        whole: Sequence[bool] = (),
    ) -> DraftTree:
        """Cut the tree of the round planned last: each row with an automatic budget keeps the nodes that pay.

        Rows of a batch are padded to the widest, so they share one width, and a width is worth the sum of the nodes
        that fill it.

        Args:
            tree: as drafted.
            proposals: gives name and own tree of each drafter, where `tree` is made of several; called in some rounds
                only, before `learn` returns.
            whole: which rows could be drafted for as deep as they ask; all by default.
        """
        now = self._round
        assert now is not None
        now.tree, now.proposals, now.whole = tree, proposals, whole or [True] * len(tree.sizes)
        known = [self._known(c.arm, r) for c, r in zip(now.choices, now.requests, strict=True)]
        chances = _chances(tree, known)
        sizes = [size - 1 for size in tree.sizes]
        width = max(sizes)
        open_rows = [row for row, request in enumerate(now.requests) if request.budget == "auto"]
        if open_rows and width:
            asked = zip(now.requests, now.choices, strict=True)
            ratios = [now.controllers[r].stats[c.arm].ratio if r.automatic else 1.0 for r, c in asked]
            seconds = self.latency.round_up_to(now.names, width, *now.costs)
            # What has a fixed budget is verified whatever the others do.
            least = max((size for row, size in enumerate(sizes) if row not in open_rows), default=0)
            width = best_width(np.array(ratios)[:, None] * chances, seconds, now.rate, least)
            floor = -math.inf
            if now.rate is not None and len(seconds) > 2:
                cheapest = float(np.diff(seconds[1:]).min()) / len(sizes)
                floor = math.log(max(FLOOR * now.rate * cheapest, 1e-30))
            for row in open_rows:
                now.controllers[now.requests[row]].chosen(width, floor)
                sizes[row] = min(sizes[row], width)
        now.expected = (1 + chances[:, :width].sum(axis=1)).tolist()
        return tree.truncate(sizes)

    def learn(
        self,
        tree: DraftTree,
        paths: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        seconds: Mapping[str, float],
    ) -> None:
        """Learn the result of the round planned last.

        Args:
            tree: as verified.
            paths: the accepted path of each row.
            answers: the tokens that the target chose along it.
            seconds: of the parts of this round, as in `ddtree.stats.PARTS`.
        """
        now, self._round = self._round, None
        assert now is not None and now.tree is not None
        self._time(now, max(tree.sizes) - 1, seconds)
        for request, controller in now.controllers.items():
            mine = [row for row, asked in enumerate(now.requests) if asked == request and now.whole[row]]
            if not mine:
                continue
            arm = now.choices[mine[0]].arm
            figures = [(len(paths[row]), tree.sizes[row] - 1, now.expected[row]) for row in mine]
            tokens, nodes, expected = np.mean(figures, axis=0).tolist()
            others = {}
            if controller.should_compare(arm):
                others = self._counterfactual(now, controller, mine, answers)
            controller.learn(arm, controller.stats[arm].observe(tokens, nodes, expected), others)
        accepted = np.zeros(tree.tokens.shape, dtype=np.bool_)
        for row, path in enumerate(paths):
            accepted[row, list(path)] = True
            if (arm := now.choices[row].arm) != OFF:
                known = self._known(arm, now.requests[row])
                known.learn(*_nodes(tree, row), accepted[row, 1 : tree.sizes[row]])

    def state(self) -> dict[str, Any]:
        """Return its figures as plain JSON values: of each kind of request under each load."""
        return {
            "groups": [
                {**vars(request), "members": list(request.members), "rows": load, **controller.state()}
                for (request, load), controller in self._controllers.items()
            ],
            "acceptance_seen": {name: known.seen for name, known in self.acceptance.items()},
        }

    def _time(self, now: _Round, nodes: int, seconds: Mapping[str, float]) -> None:
        assert now.tree is not None
        rows, context, sampled = now.costs
        self.latency.observe_verify(nodes, rows, context, seconds["verify"])
        self.latency.observe_overhead(seconds["walk"] + seconds["commit"])
        # A drafter that paused, or has a prompt before it, first takes in what was committed meanwhile: such a round
        # tells only that others take no longer.
        settled = self._drafted.issuperset(now.names) and not now.fresh
        self._drafted = frozenset(now.names)
        if now.names and all(now.whole):
            drafted, most = seconds["draft"] + seconds["build"], max(now.tree.sizes) - 1
            if settled or drafted < self.latency.draft(now.names, most, rows, context, sampled):
                self.latency.observe_draft(now.names, most, rows, context, sampled, drafted)

    def _counterfactual(
        self, now: _Round, controller: Controller, rows: Sequence[int], answers: Sequence[Sequence[int]]
    ) -> dict[Arm, float]:
        """Return the tokens a row that the other arms would have made, each with the number of nodes that pays."""
        request, made = now.requests[rows[0]], {}
        proposed = dict((now.proposals and now.proposals()) or ())
        for arm, stats in controller.stats.items():
            if arm in (OFF, now.choices[rows[0]].arm):
                continue
            if arm.members[0] not in proposed:
                made[arm] = stats.observe(1.0, 0.0, 1.0)
                continue
            tree = DraftTree.stack([proposed[arm.members[0]].row(row) for row in rows])
            known = self._known(arm, request)
            chances, width = _chances(tree, [known] * len(rows)), max(tree.sizes) - 1
            if request.budget == "auto":
                seconds = self.latency.round_up_to(arm.members, width, *now.costs)
                width = best_width(stats.ratio * chances, seconds, now.rate)
            accepted = np.zeros(tree.tokens.shape, dtype=np.bool_)
            paths, _ = walk(tree, [[]] * len(rows), following([list(answers[row]) for row in rows]))
            for row, path in enumerate(paths):
                accepted[row, path] = True
                known.learn(*_nodes(tree, row), accepted[row, 1 : tree.sizes[row]])
            tokens = float(accepted[:, : width + 1].sum()) / len(rows)
            nodes = sum(min(width, size - 1) for size in tree.sizes) / len(rows)
            made[arm] = stats.observe(tokens, nodes, 1 + float(chances[:, :width].sum()) / len(rows))
        return made

    def _controller(self, request: Request, rows: int) -> Controller:
        key = request, batch_class(rows)
        if key not in self._controllers:

            def seconds(arm: Arm, nodes: float) -> float:
                count = round(nodes)
                return float(
                    self.latency.round_up_to(arm.members, count, key[1], self._context, request.sampled)[
                        count
                    ]
                )

            self._controllers[key] = Controller(request, seconds)
        # Clients may ask in any number of ways: those that were asked for last are kept.
        self._controllers[key] = self._controllers.pop(key)
        if len(self._controllers) > MAX_CONTROLLERS:
            del self._controllers[next(iter(self._controllers))]
        return self._controllers[key]

    def _known(self, arm: Arm, request: Request) -> Acceptance:
        return self.acceptance.setdefault(_name(arm, request), Acceptance())


def _nodes(tree: DraftTree, row: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return log-probabilities and depths [n] of a row's nodes besides the root."""
    size = tree.sizes[row]
    return tree.logprobs[row, 1:size].cpu().numpy(), tree.depths[row, 1:size].cpu().numpy()


def _chances(tree: DraftTree, known: Sequence[Acceptance]) -> NDArray[np.float64]:
    """Return calibrated probabilities [R, N - 1] of the nodes besides the roots; 0 for padding."""
    chances = np.zeros((len(tree.sizes), max(tree.sizes) - 1))
    for row, own in enumerate(known):
        chances[row, : tree.sizes[row] - 1] = own.calibrated(*_nodes(tree, row))
    return chances


def _name(arm: Arm, request: Request) -> str:
    """Return the name of an arm's acceptance: noise makes another drafter of it."""
    return f"{arm}, {'sampled' if request.sampled else 'greedy'}"
