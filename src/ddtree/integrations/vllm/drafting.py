"""Drafting for vLLM's requests: what the drafter is told of their texts, how much is drafted, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree.drafters import Drafter, parts_of
from ddtree.engine.planner import Plan, Planner
from ddtree.engine.prefix_cache import PrefixStore
from ddtree.integrations.vllm.request_state import RequestState, Verified
from ddtree.integrations.vllm.trees import StepRow
from ddtree.model.kv_cache import Columns, drop_row
from ddtree.policy import OFF
from ddtree.stats import PARTS, Clock


class DrafterRows:
    """The drafter's rows. A request has one from the end of its prompt until it is finished or preempted.

    vLLM's prefix cache spares a prompt's beginning, and with it the features that a drafter reads. So features of texts
    are kept here too, by the tokens they belong to, within a bound of memory.

    Args:
        drafter: holds no rows yet.
        feature_bytes: memory for features of texts that are processed, e.g. 256 MiB.

    Attributes:
        rows: the requests that have a row, in the drafter's order.
    """

    def __init__(self, drafter: Drafter, feature_bytes: int) -> None:
        self.drafter = drafter
        self.rows: list[RequestState] = []
        self._store: PrefixStore | None = None
        if drafter.feature_layers and feature_bytes:
            self._store = PrefixStore(feature_bytes, features=True)
        # Features of prompts that are not through, and how many of a text's first tokens have none.
        self._waiting: dict[str, list[Tensor]] = {}
        self._missing: dict[str, int] = {}

    def resume(self, state: RequestState, base: int) -> None:
        """Begin, or resume, a request whose first `base` tokens vLLM has in its cache."""
        if state.observed >= base:
            return
        found = self._store.find(state.tokens[:base]) if self._store is not None else []
        parts = [part.features.clone() for part in found if part.features is not None]
        whole = sum(map(len, parts)) == base
        self._waiting[state.name] = parts if whole else []
        self._missing[state.name] = 0 if whole else base
        state.observed = base

    def observe(self, state: RequestState, base: int, count: int, features: Tensor | None) -> None:
        """Take in that the target processed `count` tokens from `base` on, with features [count, F * H]."""
        known = state.observed - base
        if known >= count:
            return
        tokens = state.tokens[state.observed : base + count]
        state.observed = base + count
        features = None if features is None else features[known:]
        row = self._row(state)
        if row is not None:
            self.drafter.observe(row, tokens, features)
            if self._store is not None:
                self._store.observe(row, features)
        elif features is not None:
            self._waiting.setdefault(state.name, []).append(features)

    def add(self, state: RequestState) -> None:
        """Open a row for a request whose prompt is processed; do nothing where it has one."""
        if self._row(state) is not None:
            return
        row, tokens = len(self.rows), state.tokens[: state.observed]
        features = self._waiting.pop(state.name, [])
        missing = self._missing.pop(state.name, 0)
        self.drafter.add_row()
        self.rows.append(state)
        if self._store is not None:
            self._store.add_row(tokens, _no_columns, features)
        if not self.drafter.feature_layers:
            self.drafter.observe(row, tokens, None)
            return
        # Drafters that read text alone get all of it. Without its first features a network's positions are shifted,
        # which changes nothing: they count relative to each other.
        for part in parts_of(self.drafter):
            if missing and not part.feature_layers:
                part.observe(row, tokens[:missing], None)
        if features:
            self.drafter.observe(row, tokens[missing:], torch.cat(features))

    def drop(self, state: RequestState) -> None:
        """Forget a request that is finished or preempted; features of its text are kept."""
        self._waiting.pop(state.name, None)
        self._missing.pop(state.name, None)
        row = self._row(state)
        if row is not None:
            if self._store is not None:
                self._store.drop_row(row, state.tokens[: state.observed], _no_columns)
            self.drafter.drop_row(row)
            drop_row(self.rows, row)
        state.observed, state.fresh = 0, True

    def _row(self, state: RequestState) -> int | None:
        return next((row for row, own in enumerate(self.rows) if own is state), None)


def _no_columns(start: int, stop: int) -> Columns:
    """Return nothing: keys and values stay with vLLM."""
    return []


@dataclass
class DraftCounters:
    """Counts over all requests since the start.

    Attributes:
        steps: verifications of a request, of the root alone included.
        drafted_steps: those with drafted nodes.
        nodes: drafted nodes verified.
        accepted: drafted nodes accepted.
        accepted_per_depth: accepted nodes by their depth.
        arms: verifications by how they were drafted for.
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
        """Count a verification of so many drafted nodes, whose path has `accepted` of them."""
        self.steps += 1
        self.drafted_steps += nodes > 0
        self.nodes += nodes
        self.accepted += accepted
        self.accepted_per_depth.update(str(depth) for depth in range(1, accepted + 1))
        self.arms[arm] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as plain JSON values."""
        return {
            name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class DraftRound:
    """Drafts that are to be verified.

    Attributes:
        names: of the requests.
        plan: their trees.
        seconds: time of drafting, by part.
    """

    names: list[str]
    plan: Plan
    seconds: dict[str, float]


class DraftScheduler:
    """Decides how each request is drafted for, step by step.

    Args:
        rows: the requests that have a row of the drafter, in its order; its owner keeps it up to date.
        planner: asks the policy and the drafter.
        clock: the planner's.
        most_nodes: most drafted nodes of a request, e.g. 32.
        most_tokens: tokens that a step may process, e.g. 2048.

    Attributes:
        counters: what was drafted, and what was accepted of it.
    """

    def __init__(
        self,
        rows: Sequence[RequestState],
        planner: Planner,
        clock: Clock,
        most_nodes: int,
        most_tokens: int,
    ) -> None:
        self.counters = DraftCounters()
        self._rows = rows
        self._planner = planner
        self._clock = clock
        self._most_nodes = most_nodes
        self._most_tokens = most_tokens
        self._round: DraftRound | None = None
        self._step = dict.fromkeys(PARTS, 0.0)
        self._since = 0.0

    def add_seconds(self, part: str, seconds: float) -> None:
        """Add the time of a part of the step; "verify" begins a step."""
        if part == "verify":
            self._step = dict.fromkeys(PARTS, 0.0)
        self._step[part] += seconds
        self.counters.seconds[part] += seconds

    def draft(
        self, states: Sequence[RequestState], rows: Sequence[StepRow], verified: Mapping[str, Verified]
    ) -> dict[str, list[int]]:
        """Learn from a step, and draft for the next one.

        Args:
            states: the requests of the step, in the batch's order.
            rows: their parts in it.
            verified: their results by name; requests whose prompt is not through have none.

        Returns:
            The tokens of the nodes besides the root, by name of the request.
        """
        made, self._round = self._round, None
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        for state, row in zip(states, rows, strict=True):
            if state.name in verified:
                arm = OFF if state.drafted is None else state.arm
                self.counters.count(row.size - 1, len(verified[state.name].path) - 1, str(arm))
        if made is not None:
            self._learn(
                made, {state.name: row for state, row in zip(states, rows, strict=True)}, verified, elapsed
            )
        ready = {
            state.name for state in states if state.name in verified and state.drafts and not state.ended
        }
        places = [place for place, state in enumerate(self._rows) if state.name in ready]
        if not places:
            return {}
        before = dict(self._clock.seconds)
        with self._clock("draft"):
            # What the scheduler would cut off need not be drafted.
            most = min(self._most_nodes, max(0, self._most_tokens // len(places) - 1))
            plan = self._planner.plan(self._rows, most, places)
        seconds = {part: self._clock.seconds[part] - before[part] for part in ("draft", "build")}
        for part, spent in seconds.items():
            self.counters.seconds[part] += spent
        asked = [self._rows[place] for place in places]
        self._round = DraftRound([state.name for state in asked], plan, seconds)
        for index, state in enumerate(asked):
            state.fresh = False
            state.drafted, state.arm = plan.tree.row(index), plan.choices[index].arm
        return {
            state.name: state.drafted.tokens[0, 1:].tolist() for state in asked if state.drafted is not None
        }

    def _learn(
        self, made: DraftRound, rows: Mapping[str, StepRow], verified: Mapping[str, Verified], elapsed: float
    ) -> None:
        """Tell the policy the result of a round that was verified as drafted, with nothing processed beside it."""
        names, plan = made.names, made.plan
        if not plan.decided or not rows.keys() == verified.keys() == set(names):
            return
        if [rows[name].size for name in names] != plan.tree.sizes:
            return
        seconds = {**self._step, **made.seconds}
        # The scheduler's work, and whatever else a step takes, is part of a round as well.
        seconds["commit"] = elapsed - sum(seconds[part] for part in ("draft", "build", "verify", "walk"))
        paths = [verified[name].path for name in names]
        self._planner.learn(plan, paths, [verified[name].tokens for name in names], seconds)
