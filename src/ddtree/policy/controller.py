"""Decide for each round which drafters draft and how many nodes are verified, and learn from the result.

Figures at the constants are of the replay, `benchmarks/auto_replay.py`, which docs/auto.md describes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.policy import OFF, Arm, Choice, Proposals, Request
from ddtree.policy.acceptance import Acceptance
from ddtree.policy.latency import Array, LatencyTable, batch_class
from ddtree.tree import MAX_BUDGET, DraftTree, following, walk

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
# Kinds of requests that are remembered: half, and rare kinds start anew sooner; double, twice the memory.
MAX_CONTROLLERS = 256


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
    # Each row makes one token whatever is drafted: the one that the target chooses after the path.
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
    _accepted: float = RATIO_PRIOR
    _promised: float = RATIO_PRIOR

    @property
    def ratio(self) -> float:
        """Calibration ratio: accepted tokens over those that calibrated probabilities promised, lately."""
        return self._accepted / self._promised

    def observe(self, tokens: float, nodes: float, expected: float) -> float:
        """Take in a round's figures a row; return `expected` times `ratio`, which scatters less than `tokens`."""
        self._drafts = min(self._drafts + 1, LEVEL_MEMORY)
        self.nodes += (nodes - self.nodes) / self._drafts
        self._accepted += tokens - 1 + (RATIO_PRIOR - self._accepted) / COMPARE_MEMORY
        self._promised += expected - 1 + (RATIO_PRIOR - self._promised) / COMPARE_MEMORY
        return 1 + (expected - 1) * self.ratio


class Controller:
    """Chooses arm and budget for the rows of one kind of request under one load.

    A round of all drafters shows what each of them alone would have made, since the answer is then known. Arms are so
    compared on the same rounds. A change of the text is seen by the arm in use, and believed of the others too.

    Args:
        request: how the rows ask to be drafted for.
        seconds: predicts the seconds of a round of an arm with so many nodes a row.

    Attributes:
        stats: figures by arm.
        current: the arm in use.
        rounds: rounds chosen for so far.
        explored: those of them that went to another arm than the one in use.
        switches: the last 64 changes of arm: round, arms before and after, reason.
    """

    def __init__(self, request: Request, seconds: Callable[[Arm, float], float]) -> None:
        self.stats = {arm: ArmStats() for arm in request.arms()}
        self.current = self._all_drafters = next(iter(self.stats))
        self.rounds = self.explored = 0
        self.switches: deque[dict[str, Any]] = deque(maxlen=64)
        self._budget = request.budget
        self._seconds = seconds
        self._rounds_learnt = self._switched = 0
        self._exploration_credit = self._recent_width = 0.0
        self._draft_cap = FIRST_CAP

    def choose(self) -> Choice:
        """Return how the next round is drafted."""
        self.rounds += 1
        self._maybe_switch()
        arm = self.current
        self._exploration_credit = min(1.0, self._exploration_credit + EXPLORATION)
        # All drafters are explored, but "off" while its time is hardly known.
        probe = OFF if self.stats[OFF].rounds < OFF_PROBES else self._all_drafters
        if self._exploration_credit >= 1 and probe != arm:
            arm, self._exploration_credit = probe, 0.0
            self.explored += 1
        if arm == OFF:
            return Choice(OFF, 0)
        return Choice(arm, self._draft_cap if self._budget == "auto" else self._budget)

    def learn(self, arm: Arm, tokens: float, others: Mapping[Arm, float]) -> None:
        """Learn the tokens a row of a round, and those that other arms would have made, where they are known.

        All arms move with the arm in use; those that are compared also by themselves, and more slowly.
        """
        own = self.stats[arm]
        own.rounds += 1
        if arm == OFF:
            return
        self._rounds_learnt += 1
        change = 1 + (tokens / own.tokens - 1) / min(self._rounds_learnt, LEVEL_MEMORY)
        for stats in self.stats.values():
            stats.tokens *= change
        if arm == self._all_drafters:
            for other, made in {arm: tokens, **others}.items():
                stats = self.stats[other]
                stats.compared = min(stats.compared + 1, COMPARE_MEMORY)
                if other != arm:
                    stats.tokens += (made * own.tokens / tokens - stats.tokens) / stats.compared

    def should_compare(self, played: Arm) -> bool:
        """Return whether a round of that arm is to show what other arms would have made of it."""
        few = self.stats[self._all_drafters].compared < COMPARE_ALWAYS
        return (
            played == self._all_drafters and len(self.stats) > 2 and (few or self.rounds % COMPARE_EVERY == 0)
        )

    def chosen(self, width: int) -> None:
        """Note how many nodes paid: somewhat more are drafted next, since building costs."""
        self._recent_width = max(float(width), self._recent_width + (width - self._recent_width) * 0.1)
        self._draft_cap = min(MAX_BUDGET, max(LEAST_CAP, round(self._recent_width * 1.25) + 2))

    def tokens(self, arm: Arm) -> float:
        """Return the tokens a row and round that an arm is expected to make now."""
        return 1.0 if arm == OFF else max(1.0, self.stats[arm].tokens)

    def speed(self, arm: Arm) -> float | None:
        """Return the tokens a row and second that an arm is expected to make now; None while it is unknown."""
        stats = self.stats[arm]
        known = arm == OFF or stats.compared >= 1
        return self.tokens(arm) / self._seconds(arm, stats.nodes) if known else None

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
                    "tokens_per_second": self.speed(arm),
                }
                for arm, stats in self.stats.items()
            },
            "switches": list(self.switches),
        }

    def _maybe_switch(self) -> None:
        if self.rounds - self._switched <= DWELL or (ours := self.speed(self.current)) is None:
            return
        theirs, best = max(((self.speed(arm) or 0.0, arm) for arm in self.stats), key=lambda pair: pair[0])
        if theirs > ours * MARGIN:
            reason = f"{theirs:.1f} against {ours:.1f} tokens a second a row"
            before, after = str(self.current), str(best)
            self.switches.append({"round": self.rounds, "before": before, "after": after, "reason": reason})
            self.current, self._switched = best, self.rounds


class _OpenRound:
    """A round between its plan and its result.

    Args:
        requests: of its rows.
        choices: of its rows.
        controllers: by each request that leaves something to decide.
        context: mean committed tokens of a row.
        fresh: a row is in its first round.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        choices: list[Choice],
        controllers: Mapping[Request, Controller],
        context: float,
        fresh: bool,
    ) -> None:
        self.requests, self.choices, self.controllers, self.fresh = requests, choices, controllers, fresh
        # Rows, context, and whether one of them samples: as the latency table takes them.
        self.load = len(requests), context, any(request.sampled for request in requests)
        speeds = [controller.speed(controller.current) for controller in controllers.values()]
        known = [speed for speed in speeds if speed is not None]
        self.rate = sum(known) / len(known) * len(requests) if known and len(known) == len(speeds) else None
        self.tree: DraftTree
        self.nodes: list[NDArray[np.float32]]
        self.proposals: Callable[[], Proposals | None]
        self.whole: Sequence[bool]
        self.acceptances: list[Acceptance]
        self.expected: list[float]

    @property
    def names(self) -> list[str]:
        """Return the names of all drafters that draft in it."""
        return list(dict.fromkeys(name for choice in self.choices for name in choice.arm.members))


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
        self.acceptance = defaultdict(Acceptance, acceptance or {})
        self._controllers: dict[tuple[Request, int], Controller] = {}
        self._context = 0.0
        self._round: _OpenRound
        self._drafted: set[str] = set()

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
        self._round = _OpenRound(requests, choices, own, self._context, any(fresh))
        return choices

    def cut(
        self,
        tree: DraftTree,
        proposals: Callable[[], Proposals | None] = lambda: None,
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
        now.tree, now.proposals, now.whole = tree, proposals, whole or [True] * len(tree.sizes)
        asked = list(zip(now.requests, now.choices, strict=True))
        now.acceptances = [self._acceptance_of(choice.arm, request) for request, choice in asked]
        now.nodes = _nodes(tree)
        chances = _chances(now.nodes, now.acceptances)
        sizes = [size - 1 for size in tree.sizes]
        width = max(sizes)
        if width and any(request.budget == "auto" for request in now.requests):
            ratios = [now.controllers[r].stats[c.arm].ratio if r.automatic else 1.0 for r, c in asked]
            # What has a fixed budget is verified whatever the others do.
            fixed = [size for size, (r, _) in zip(sizes, asked, strict=True) if r.budget != "auto"]
            seconds = self.latency.round_seconds(now.names, width, *now.load)
            width = best_width(np.array(ratios)[:, None] * chances, seconds, now.rate, max(fixed, default=0))
            for row, request in enumerate(now.requests):
                if request.budget == "auto":
                    now.controllers[request].chosen(width)
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
        now = self._round
        self._time(now, max(tree.sizes) - 1, seconds)
        for request, controller in now.controllers.items():
            rows = [row for row, asked in enumerate(now.requests) if asked == request and now.whole[row]]
            if rows:
                arm = now.choices[rows[0]].arm
                figures = [(len(paths[row]), tree.sizes[row] - 1, now.expected[row]) for row in rows]
                tokens = controller.stats[arm].observe(*np.mean(figures, axis=0).tolist())
                compared = controller.should_compare(arm)
                others = self._learn_counterfactuals(now, controller, rows, answers) if compared else {}
                controller.learn(arm, tokens, others)
        verified = zip(now.nodes, tree.sizes, strict=True)
        _count([own[:, : size - 1] for own, size in verified], paths, now.acceptances)

    def state(self) -> dict[str, Any]:
        """Return its figures as plain JSON values: of each kind of request under each load."""
        return {
            "groups": [
                {**vars(request), "members": list(request.members), "rows": load, **controller.state()}
                for (request, load), controller in self._controllers.items()
            ],
            "acceptance_seen": {name: known.seen for name, known in self.acceptance.items()},
        }

    def _time(self, now: _OpenRound, nodes: int, seconds: Mapping[str, float]) -> None:
        rows, context, sampled = now.load
        self.latency.observe_verify(nodes, rows, context, seconds["verify"])
        self.latency.observe_overhead(seconds["walk"] + seconds["commit"])
        # A drafter that paused, or has a prompt before it, first takes in what was committed meanwhile: such a round
        # tells only that others take no longer.
        settled = self._drafted.issuperset(now.names) and not now.fresh
        self._drafted = set(now.names)
        if now.names and all(now.whole):
            drafted, most = seconds["draft"] + seconds["build"], max(now.tree.sizes) - 1
            if settled or drafted < self.latency.draft(now.names, most, rows, context, sampled):
                self.latency.observe_draft(now.names, most, rows, context, sampled, drafted)

    def _learn_counterfactuals(
        self, now: _OpenRound, controller: Controller, rows: Sequence[int], answers: Sequence[Sequence[int]]
    ) -> dict[Arm, float]:
        """Learn what the other arms would have made of a round, whose answer is now known.

        Each is given the number of nodes that pays for it. Their acceptance and figures learn as from a round of their
        own. Returns the tokens a row that each would have made.
        """
        request, made = now.requests[rows[0]], {}
        proposed = dict(now.proposals() or ())
        for arm, stats in list(controller.stats.items())[1:-1]:
            own = proposed.get(arm.members[0])
            tree = DraftTree.stack([own.row(row) for row in rows]) if own else DraftTree.root([0] * len(rows))
            known = [self._acceptance_of(arm, request)] * len(rows)
            nodes, width = _nodes(tree), max(tree.sizes) - 1
            chances = _chances(nodes, known)
            if request.budget == "auto":
                seconds = self.latency.round_seconds(arm.members, width, *now.load)
                width = best_width(stats.ratio * chances, seconds, now.rate)
            paths, _ = walk(tree, [[]] * len(rows), following([list(answers[row]) for row in rows]))
            _count(nodes, paths, known)
            totals = [
                sum(node <= width for path in paths for node in path),
                sum(min(width, size - 1) for size in tree.sizes),
                len(rows) + float(chances[:, :width].sum()),
            ]
            made[arm] = stats.observe(*(total / len(rows) for total in totals))
        return made

    def _controller(self, request: Request, rows: int) -> Controller:
        key = request, batch_class(rows)
        # Clients may ask in any number of ways: those that were asked for last are kept.
        controller = self._controllers.pop(key, None) or Controller(request, partial(self._seconds, *key))
        self._controllers[key] = controller
        if len(self._controllers) > MAX_CONTROLLERS:
            del self._controllers[next(iter(self._controllers))]
        return controller

    def _seconds(self, request: Request, rows: int, arm: Arm, nodes: float) -> float:
        """Return the seconds of a round of an arm at the present context."""
        load = rows, self._context, request.sampled
        return float(self.latency.round_seconds(arm.members, round(nodes), *load)[-1])

    def _acceptance_of(self, arm: Arm, request: Request) -> Acceptance:
        """Return the acceptance of an arm, kept apart for greedy and sampled requests."""
        return self.acceptance[f"{arm}, {'sampled' if request.sampled else 'greedy'}"]


def _nodes(tree: DraftTree) -> list[NDArray[np.float32]]:
    """Return log-probabilities and depths [2, n] of each row's nodes besides the root, in one read of the device."""
    rows = torch.stack([tree.logprobs, tree.depths.float()], dim=1).cpu().numpy()
    return [row[:, 1:size] for row, size in zip(rows, tree.sizes, strict=True)]


def _chances(nodes: Sequence[NDArray[np.float32]], known: Sequence[Acceptance]) -> Array:
    """Return calibrated probabilities [R, N - 1] of the nodes besides the roots; 0 for padding."""
    chances = np.zeros((len(nodes), max(own.shape[1] for own in nodes)))
    for row, ((logprobs, depths), acceptance) in enumerate(zip(nodes, known, strict=True)):
        chances[row, : len(depths)] = acceptance.calibrated(logprobs, depths.astype(np.int64))
    return chances


def _count(
    nodes: Sequence[NDArray[np.float32]], paths: Sequence[Sequence[int]], known: Sequence[Acceptance]
) -> None:
    """Count in each row's acceptance which of its nodes are on the accepted path."""
    for (logprobs, depths), path, acceptance in zip(nodes, paths, known, strict=True):
        accepted = np.isin(np.arange(1, len(depths) + 1), path)
        acceptance.learn(logprobs, depths.astype(np.int64), accepted)
