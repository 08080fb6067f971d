"""Measures what rounds cost, on the path that rounds take.

All points are visited in turns, so that a spell of slowness touches one measurement of many points and not all of
one; the median of each point counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from ddtree.autoregressive import AutoregressiveTarget
from ddtree.drafters import Drafter
from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.policy.curve import Sample
from ddtree.policy.latency import CUT_SHORT, LatencyModel
from ddtree.policy.machine import describe
from ddtree.policy.stands import DrafterStand, TargetStand
from ddtree.target import Target
from ddtree.tree import MAX_BUDGET

WIDTHS = (1, 2, 3, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025)
CONTEXTS = (32, 256, 768, 2048)
TURNS = 7

Progress = Callable[[int, int], None]
"""Called with how much is done, of how much."""

_DRAFT_WIDTHS = (2, 5, 9, 17, 33, 65, 129, 257)
_QUICK_WIDTHS = (1, 2, 9, 17, 33, 65, 129, 257, 513, 1025)
_QUICK_CONTEXTS = (48, 512)
_QUICK_DRAFT_WIDTHS = (9, 33)
_LEAST_WIDTHS = 4  # without the slope from one width to another there is nothing to decide by
_PASSES = 3  # drafts of each width while a drafter holds the same rows


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
    every = _ascending("contexts", contexts, 2, 2**31)
    _ascending("turns", [turns], 1, 10_000)
    groups = [
        _Group(count, context, chosen) for count in _ascending("rows", rows, 1, 1024) for context in every
    ]
    dearest = 4.0 if widths is None else float("inf")
    return _measure(target, drafter, _Plan(groups, turns, dearest, _DRAFT_WIDTHS, progress=progress))


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
    short, long = _QUICK_CONTEXTS
    groups = [_Group(1, short, _QUICK_WIDTHS), _Group(1, long, (1, 9, 33))]
    if rows > 1:
        groups.append(_Group(min(rows, 4), short, (1, 9)))
    return _measure(target, drafter, _Plan(groups, 3, 2.2, _QUICK_DRAFT_WIDTHS, seconds))


@dataclass(frozen=True)
class _Group:
    """Points that are measured while the target and the drafter hold the same rows."""

    rows: int
    context: int
    widths: tuple[int, ...]


@dataclass
class _Plan:
    """What to measure.

    Attributes:
        groups: the points, their widths in ascending order.
        turns: measurements of each, besides the first, which warms up.
        dearest: a tree that costs so many times the root is the widest that is measured of a group.
        drafts: widths to draft at.
        seconds: how long it may take; infinite for as long as it takes.
        progress: called now and then.
        cut_short: something was left out for want of time.
    """

    groups: list[_Group]
    turns: int
    dearest: float
    drafts: tuple[int, ...]
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
            self.progress(self._done, len(self.groups) * (self.turns + 1 + self.rounds))

    @property
    def rounds(self) -> int:
        """Turns of drafting: each has several passes."""
        return -(-self.turns // _PASSES)


def _measure(target: Target | AutoregressiveTarget, drafter: Drafter | None, plan: _Plan) -> LatencyModel:
    if not isinstance(target, Target):
        raise UnsupportedModelError(
            f"draft trees cannot be verified on {type(target.model).__name__}: there is nothing to calibrate"
        )
    with _features(target, drafter.feature_layers if drafter else ()):
        stand = TargetStand(target, max(group.context for group in plan.groups), lambda: plan.gives_up(0.4))
        plan.cut(len(stand.text.tokens))
        verify = _verifications(stand, plan)
    draft: dict[str, list[Sample]] = {}
    if drafter is not None:
        with closing(DrafterStand(drafter, stand.text, target)) as drafting:
            draft = _drafts(drafting, drafter, plan)
    machine = {**describe(target, drafter), "turns": plan.turns, CUT_SHORT: plan.cut_short}
    return LatencyModel.fit(verify, draft, machine=machine)


@contextmanager
def _features(target: Target, layers: tuple[int, ...]) -> Iterator[None]:
    before = target.feature_layers
    target.use_features(layers)
    try:
        yield
    finally:
        target.use_features(before)


def _verifications(stand: TargetStand, plan: _Plan) -> list[Sample]:
    """Samples of all points, or of as many as there was time for."""
    first: list[Sample] = []
    timed: list[Sample] = []
    kept: dict[_Group, list[int]] = {}
    for group in plan.groups:
        kept[group] = []
        if first and plan.gives_up(0.6):
            continue
        stand.occupy(group.rows, group.context)
        for width, seconds in _warm(stand, group.widths, plan):
            kept[group].append(width)
            first.append(Sample(width, group.rows, group.context, seconds))
        plan.step()
    for turn in range(plan.turns):
        order = 1 if turn % 2 else -1
        for group in plan.groups[::order]:
            stand.occupy(group.rows, group.context)
            for width in kept[group][::order]:
                if plan.over(0.7):
                    break
                timed.append(Sample(width, group.rows, group.context, stand.verify(width)))
            plan.step()
    again = {(sample.width, sample.rows, sample.context) for sample in timed}
    once = [sample for sample in first if (sample.width, sample.rows, sample.context) not in again]
    plan.cut_short |= bool(once)
    return timed + once


def _warm(stand: TargetStand, widths: Sequence[int], plan: _Plan) -> Iterator[tuple[int, float]]:
    """Widths with a first measurement, narrow ones first, until a tree is too dear or time runs out."""
    root = 0.0
    for place, width in enumerate(widths):
        if place >= _LEAST_WIDTHS and plan.gives_up(0.6):
            return
        seconds = stand.verify(width)
        # The first pass of a shape may have had something to set up.
        if place == 0 or seconds > plan.dearest * root:
            seconds = min(seconds, stand.verify(width))
        root = root or seconds
        yield width, seconds
        if seconds > plan.dearest * root:
            return


def _drafts(stand: DrafterStand, drafter: Drafter, plan: _Plan) -> dict[str, list[Sample]]:
    """Samples of the drafter by its name, and of each part of a merged one by the part's."""
    parts: list[tuple[str, tuple[str, ...] | None]] = [(drafter.name, None)]
    parts += [(part.name, (part.name,)) for part in getattr(drafter, "drafters", ())]
    found: dict[str, list[Sample]] = {name: [] for name, _ in parts}
    for turn in range(plan.rounds):
        for group in plan.groups[:: -1 if turn % 2 else 1]:
            if not (_enough(found) and plan.gives_up(1.0)):
                _draft_group(stand, group, parts, plan, found)
            plan.step()
    return found


def _draft_group(
    stand: DrafterStand,
    group: _Group,
    parts: list[tuple[str, tuple[str, ...] | None]],
    plan: _Plan,
    found: dict[str, list[Sample]],
) -> None:
    stand.occupy(group.rows, group.context)
    for again in range(_PASSES):
        for width in plan.drafts[:: -1 if again % 2 else 1]:
            if _enough(found) and plan.gives_up(1.0):
                return
            for name, members in parts:
                seconds = stand.draft(width, members)
                found[name].append(Sample(width, group.rows, group.context, seconds))


def _enough(found: dict[str, list[Sample]]) -> bool:
    """Whether a spell of slowness can be outvoted."""
    return all(len(samples) >= 3 for samples in found.values())


def _ascending(name: str, values: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """The values without repetition. Raises ConfigError unless they are whole numbers in low..high."""
    if not values:
        raise ConfigError(f"{name} is empty: give at least one number")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} holds {value!r}: give whole numbers in {low}..{high}")
    return tuple(sorted(set(values)))
