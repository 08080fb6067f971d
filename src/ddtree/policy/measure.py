"""Measures what rounds cost, on the path that rounds take.

As in rounds, a draft comes before each verification: either finds the processor's caches filled by the other. All
points are visited in turns, so that a spell of slowness touches one measurement of many points and not all of one;
the median of each point counts.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ddtree.drafters import Drafter
from ddtree.errors import CacheMemoryError, ConfigError, UnsupportedModelError
from ddtree.model.autoregressive import AutoregressiveTarget
from ddtree.model.target import Target
from ddtree.policy.curve import Sample
from ddtree.policy.latency import CUT_SHORT, LatencyModel
from ddtree.policy.machine import describe
from ddtree.policy.stands import DrafterStand, TargetStand
from ddtree.tree import MAX_BUDGET

WIDTHS = (1, 2, 3, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025)
CONTEXTS = (32, 256, 768, 2048)
TURNS = 7

_Part = tuple[str, tuple[str, ...] | None]
Progress = Callable[[int, int], None]
"""Called with how much is done, of how much."""

_QUICK_WIDTHS = (1, 2, 9, 17, 33, 65, 129, 257, 513, 1025)
_QUICK_CONTEXTS = (48, 512)
_LEAST_WIDTHS = 4  # without the slope from one width to another there is nothing to decide by


def calibrate(
    target: Target | AutoregressiveTarget,
    drafter: Drafter | None = None,
    *,
    rows: Sequence[int] = (1,),
    contexts: Sequence[int] = CONTEXTS,
    widths: Sequence[int] | None = None,
    turns: int = TURNS,
    progress: Progress | None = None,
) -> LatencyModel:
    """Measure thoroughly and fit.

    Nothing else may run on the target and the drafter meanwhile. The drafter may hold no rows; it holds none after.

    Args:
        target: to verify with.
        drafter: to draft with; each part of a merged one is measured too.
        rows: batch sizes.
        contexts: committed tokens a row, 2 or more; those beyond the target's context are cut to it.
        widths: nodes a row, root included, 1..1025; by default up to where a pass costs four times the root's.
        turns: measurements of each point.
        progress: called now and then.

    Raises:
        ConfigError: an argument is out of range.
        UnsupportedModelError: trees cannot be verified on the target.
        CacheMemoryError: the device cannot hold the rows.
    """
    chosen = _ascending("widths", WIDTHS if widths is None else widths, 1, MAX_BUDGET + 1)
    if drafter is not None and chosen[-1] == 1:
        raise ConfigError("widths holds 1 alone, and a drafter's trees are wider: give some from 2 on too")
    every = _ascending("contexts", contexts, 2, 2**31)
    _ascending("turns", [turns], 1, 10_000)
    groups = [
        _Group(count, context, chosen) for count in _ascending("rows", rows, 1, 1024) for context in every
    ]
    dearest = 4.0 if widths is None else float("inf")
    return _measure(target, drafter, _Plan(groups, turns, dearest, progress=progress))


def quick(
    target: Target | AutoregressiveTarget,
    drafter: Drafter | None = None,
    *,
    rows: int = 1,
    seconds: float = 2.5,
) -> LatencyModel:
    """A brief `calibrate` for first use, with the same errors.

    Args:
        target: to verify with.
        drafter: to draft with.
        rows: most rows that will be decoded at once.
        seconds: about how long it may take. On a slow model, or a busy machine, fewer points and turns are measured,
            and `machine["cut_short"]` is true.
    """
    return _measure(target, drafter, _quick(rows, MAX_BUDGET + 1, seconds))


def quick_on(
    verifying: Any, drafter: Drafter, target: Any, *, rows: int, widest: int, seconds: float = 2.5
) -> LatencyModel:
    """`quick` where another engine than ours verifies.

    Args:
        verifying: has what `TargetStand` has.
        drafter: to draft with.
        target: what the drafter was made for.
        rows: most rows that will be decoded at once.
        widest: most nodes of a row, root included.
        seconds: about how long it may take.
    """
    return _on(verifying, drafter, target, _quick(rows, widest, seconds))


def _quick(rows: int, widest: int, seconds: float) -> _Plan:
    short, long = _QUICK_CONTEXTS
    groups = [_Group(1, short, _QUICK_WIDTHS), _Group(1, long, (1, 9, 33))]
    if rows > 1:
        groups.append(_Group(min(rows, 4), short, (1, 9)))
    fitting = [
        _Group(g.rows, g.context, tuple(width for width in g.widths if width <= widest)) for g in groups
    ]
    return _Plan(fitting, 3, 2.2, seconds)


@dataclass(frozen=True)
class _Group:
    """Points that are measured while the target and the drafter hold the same rows."""

    rows: int
    context: int
    widths: tuple[int, ...]


@dataclass
class _Samples:
    """What was measured.

    Attributes:
        verify: verifications.
        draft: drafts, by the name of what drafted.
    """

    verify: list[Sample] = field(default_factory=list)
    draft: defaultdict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))

    def complete(self, first: _Samples) -> bool:
        """Take over from the first measurements what was not measured again; returns whether there was any."""
        again = {_point(sample) for sample in self.verify}
        once = [sample for sample in first.verify if _point(sample) not in again]
        self.verify += once
        for name, samples in first.draft.items():
            if name not in self.draft:
                self.draft[name] = samples
        return bool(once)


def _point(sample: Sample) -> tuple[int, int, float]:
    return sample.width, sample.rows, sample.context


@dataclass
class _Plan:
    """What to measure.

    Attributes:
        groups: the points, their widths in ascending order.
        turns: measurements of each, besides the first, which warms up.
        dearest: a tree that costs so many times the root is the widest that is measured of a group.
        seconds: how long it may take; infinite for as long as it takes.
        progress: called now and then.
        cut_short: something was left out for want of time.
    """

    groups: list[_Group]
    turns: int
    dearest: float
    seconds: float = float("inf")
    progress: Progress | None = None
    cut_short: bool = False
    _started: float = field(default_factory=lambda: time.perf_counter())
    _done: int = 0

    def over(self, share: float) -> bool:
        """Whether that share of the time is used up."""
        return time.perf_counter() - self._started > share * self.seconds

    def gives_up(self, share: float) -> bool:
        """As `over`, where something is left out then."""
        over = self.over(share)
        self.cut_short |= over
        return over

    def cut(self, longest: int) -> None:
        """Leave no context longer than that."""
        self.groups = list(
            dict.fromkeys(_Group(g.rows, min(g.context, longest), g.widths) for g in self.groups)
        )

    def step(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, len(self.groups) * (self.turns + 1))


def _measure(target: Target | AutoregressiveTarget, drafter: Drafter | None, plan: _Plan) -> LatencyModel:
    if not isinstance(target, Target):
        raise UnsupportedModelError(
            f"draft trees cannot be verified on {type(target.model).__name__}: there is nothing to calibrate"
        )
    with _features(target, drafter.feature_layers if drafter else ()), _room(target):
        verifying = TargetStand(
            target, max(group.context for group in plan.groups), lambda: plan.gives_up(0.4)
        )
        return _on(verifying, drafter, target, plan)


def _on(verifying: Any, drafter: Drafter | None, target: Any, plan: _Plan) -> LatencyModel:
    plan.cut(len(verifying.text.tokens))
    if drafter is None:
        found = _Rounds(verifying, None, ()).measure(plan)
    else:
        parts: list[_Part] = [(drafter.name, None)]
        parts += [(part.name, (part.name,)) for part in getattr(drafter, "drafters", ())]
        with closing(DrafterStand(drafter, verifying.text, target)) as drafting:
            found = _Rounds(verifying, drafting, parts).measure(plan)
    machine = {**describe(target, drafter), "turns": plan.turns, CUT_SHORT: plan.cut_short}
    return LatencyModel.fit(found.verify, found.draft, machine=machine)


@contextmanager
def _room(target: Target) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CacheMemoryError(
            f"{target.device} ran out of memory while measuring: measure fewer rows, shorter contexts or fewer nodes"
        ) from error


@contextmanager
def _features(target: Target, layers: tuple[int, ...]) -> Iterator[None]:
    before = target.feature_layers
    target.use_features(layers)
    try:
        yield
    finally:
        target.use_features(before)


class _Rounds:
    """Drafts and verifications, one after the other.

    Args:
        verifying: times verification.
        drafting: times drafting; None without a drafter.
        parts: what drafts in turn: names for the samples, and the members that each stands for.
    """

    def __init__(self, verifying: TargetStand, drafting: DrafterStand | None, parts: Sequence[_Part]) -> None:
        self._verifying = verifying
        self._drafting = drafting
        self._parts = parts
        self._drafts: Counter[tuple[_Group, int]] = Counter()

    def measure(self, plan: _Plan) -> _Samples:
        """Samples of all points, or of as many as there was time for."""
        first, timed = _Samples(), _Samples()
        kept = {}
        for group in plan.groups:
            skipped = bool(first.verify) and plan.gives_up(0.6)
            kept[group] = [] if skipped else self._warm(group, plan, first)
            plan.step()
        for turn in range(plan.turns):
            order = 1 if turn % 2 else -1
            for group in plan.groups[::order]:
                if kept[group] and not plan.over(1.0):
                    self._occupy(group)
                for width in kept[group][::order]:
                    if plan.over(1.0):
                        break
                    self._round(group, width, timed)
                plan.step()
        plan.cut_short |= timed.complete(first)
        self._rest(plan, timed)
        return timed

    def _rest(self, plan: _Plan, found: _Samples) -> None:
        """Draft with the parts whose turn has not come."""
        missing = [part for part in self._parts if part[0] not in found.draft]
        if self._drafting is None or not missing:
            return
        group = plan.groups[0]
        width = max(2, *(sample.width for sample in found.verify))
        self._drafting.occupy(group.rows, group.context)
        for name, members in missing:
            self._drafting.draft(width, members)  # the first may have had something to set up
            seconds = self._drafting.draft(width, members)
            found.draft[name].append(Sample(width, group.rows, group.context, seconds))

    def _warm(self, group: _Group, plan: _Plan, found: _Samples) -> list[int]:
        """Measure narrow trees first, until one is too dear or time runs out; returns the widths measured."""
        self._occupy(group)
        root = 0.0
        for place, width in enumerate(group.widths):
            if place >= _LEAST_WIDTHS and plan.gives_up(0.6):
                return list(group.widths[:place])
            seconds = self._round(group, width, found)
            # The first pass of a shape may have had something to set up.
            if place == 0 or seconds > plan.dearest * root:
                seconds = min(seconds, self._round(group, width, found))
            root = root or seconds
            if seconds > plan.dearest * root:
                return list(group.widths[: place + 1])
        return list(group.widths)

    def _occupy(self, group: _Group) -> None:
        self._verifying.occupy(group.rows, group.context)
        if self._drafting is not None:
            self._drafting.occupy(group.rows, group.context)

    def _round(self, group: _Group, width: int, found: _Samples) -> float:
        """Draft and verify; returns the seconds of verification."""
        if self._drafting is not None and width > 1:
            # Every part gets to every point, and neighbouring points are drafted by different ones.
            turn = self._drafts[group, width] + group.widths.index(width)
            self._drafts[group, width] += 1
            name, members = self._parts[turn % len(self._parts)]
            seconds = self._drafting.draft(width, members)
            found.draft[name].append(Sample(width, group.rows, group.context, seconds))
        seconds = self._verifying.verify(width)
        found.verify.append(Sample(width, group.rows, group.context, seconds))
        return seconds


def _ascending(name: str, values: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """The values without repetition. Raises ConfigError unless they are whole numbers in low..high."""
    if not values:
        raise ConfigError(f"{name} is empty: give at least one number")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} holds {value!r}: give whole numbers in {low}..{high}")
    return tuple(sorted(set(values)))
