"""Measures what rounds cost, on the path that rounds take.

As in rounds, a draft comes before each verification: either finds the processor's caches filled by the other. All
points are visited several times in alternating order, so that a slow spell touches one measurement of many points and
not all of one; the median of each point counts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ddtree.drafters import Drafter, DraftRow, parts_of
from ddtree.errors import CacheMemoryError, ConfigError, UnsupportedModelError
from ddtree.model.protocol import TargetModel
from ddtree.policy import cache
from ddtree.policy.controller import Policy
from ddtree.policy.latency import CUT_SHORT, LatencyTable, Sample
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree

WIDTHS = (1, 2, 3, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025)
CONTEXTS = (32, 256, 768, 2048)
TURNS = 7
QUICK_GRID = {(1, 48): (1, 2, 9, 17, 33, 65, 129, 257, 513, 1025), (1, 512): (1, 9, 33)}
COMMITTED = 4
"""Tokens a round commits: a drafter has to take them in before it drafts."""


class VerifyTimer(Protocol):
    """Times verification, by our engine or by another one.

    Attributes:
        longest: most committed tokens of a row that `setup` can give, e.g. 2048.
    """

    longest: int

    def setup(self, rows: int, context: int) -> None:
        """Hold that many rows with `context` committed tokens on average."""

    def verify(self, width: int) -> float:
        """Return the seconds of verifying a binary tree of `width` nodes for each row."""


class TargetTimer:
    """Times verification by a target, a `VerifyTimer`.

    Raises:
        ConfigError: the target's context is too short.
    """

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._cache = target.new_cache()
        self._tokens = uneven_tokens(MAX_BUDGET + 1, target.vocab_size)
        self.longest = target.max_context - MAX_DEPTH - 2
        if self.longest < 2:
            raise ConfigError(
                f"a context of {target.max_context} tokens is too short to calibrate: give {MAX_DEPTH + 4} or more"
            )

    def setup(self, rows: int, context: int) -> None:
        """Hold that many rows with `context` committed tokens on average."""
        while self._cache.rows > rows:
            self._cache.drop_row(self._cache.rows - 1)
        while self._cache.rows < rows:
            self._cache.add_row()
        # The values in the cache have no bearing on time. Rows of a batch differ in length, which takes other paths.
        lengths = [context + (1 if row % 2 else -1) for row in range(rows)]
        if rows % 2:
            lengths[-1] = context
        self._cache.lengths[:] = lengths

    def verify(self, width: int) -> float:
        """Return the seconds of verifying a binary tree of `width` nodes for each row."""
        tree = binary_tree(width, self._cache.rows, self._tokens, self._target.device)
        return _seconds(self._target.device, lambda: self._target.verify(self._cache, tree))


class DraftTimer:
    """Times drafting. The drafter may hold no rows before; `close` leaves it without.

    Args:
        drafter: a drafter.
        target: the target that the drafter drafts for.
        longest: most committed tokens of a row.
    """

    def __init__(self, drafter: Drafter, target: Any, longest: int) -> None:
        self._drafter = drafter
        self._target = target
        self._tokens = uneven_tokens(longest, target.vocab_size)
        width = len(drafter.feature_layers) * target.hidden_size
        self._features = torch.randn(longest, width, dtype=target.dtype, device=target.device)
        self._rows = self._context = self._length = 0

    def setup(self, rows: int, context: int) -> None:
        """Hold that many rows of about `context` committed tokens, and draft once, so that they are processed."""
        self.close()
        self._context, self._length = context, 0
        for _ in range(rows):
            self._drafter.add_row()
            self._rows += 1
        self._commit(context)
        self._draft(2, None)

    def draft(self, width: int, members: tuple[str, ...]) -> float:
        """Return the seconds of drafting `width` - 1 nodes for each row, after as many tokens as a round commits."""
        longest = min(self._context + max(16, self._context // 8), self._target.max_context)
        if self._length + 2 * COMMITTED > longest:
            self.setup(self._rows, self._context)
        self._commit(COMMITTED)
        return self._draft(width, members)

    def close(self) -> None:
        """Free the drafter's rows."""
        while self._rows:
            self._rows -= 1
            self._drafter.drop_row(self._rows)

    def _commit(self, count: int) -> None:
        places = [place % len(self._tokens) for place in range(self._length, self._length + count)]
        features = self._features[places] if self._drafter.feature_layers else None
        for row in range(self._rows):
            self._drafter.observe(row, [self._tokens[place] for place in places], features)
        self._length += count

    def _draft(self, width: int, members: tuple[str, ...] | None) -> float:
        tokens = [self._tokens[place % len(self._tokens)] for place in range(self._length + 1)]
        depth = min(MAX_DEPTH, self._drafter.max_depth)
        rows = [DraftRow(list(tokens), width - 1, depth, members=members) for _ in range(self._rows)]
        return _seconds(self._target.device, lambda: self._drafter.draft(rows, Clock()))


def thorough(
    target: TargetModel,
    drafter: Drafter | None = None,
    *,
    rows: Sequence[int] = (1,),
    contexts: Sequence[int] = CONTEXTS,
    widths: Sequence[int] | None = None,
    turns: int = TURNS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatencyTable:
    """Measure all points several times.

    Nothing else may run on the target and the drafter meanwhile. The drafter may hold no rows; it holds none after.

    Args:
        target: to verify with.
        drafter: to draft with, each of several alone.
        rows: batch sizes.
        contexts: committed tokens a row, 2 or more; those beyond the target's context are cut to it.
        widths: nodes a row, root included, 1..1025; by default up to where a pass costs four times the root's.
        turns: measurements of each point.
        progress: called with how much is done, of how much.

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
    grid = {(count, context): chosen for count in _ascending("rows", rows, 1, 1024) for context in every}
    dearest = 4.0 if widths is None else float("inf")
    return _on_target(target, drafter, grid=grid, turns=turns, dearest=dearest, progress=progress)


def quick(target: TargetModel, drafter: Drafter | None = None, *, seconds: float = 2.5) -> LatencyTable:
    """Measure briefly, one row at a time, for first use; with the same errors as `thorough`.

    Args:
        target: to verify with.
        drafter: to draft with.
        seconds: about how long it may take. On a slow model, or a busy machine, fewer points and turns are measured,
            and `machine["cut_short"]` is true.
    """
    return _on_target(target, drafter, grid=QUICK_GRID, turns=3, dearest=2.2, seconds=seconds)


def quick_on(
    timer: VerifyTimer, drafter: Drafter, target: Any, *, widest: int, seconds: float = 2.5
) -> LatencyTable:
    """Measure briefly where another engine than ours verifies.

    Args:
        timer: times verification.
        drafter: to draft with.
        target: the target that the drafter was made for.
        widest: most nodes of a row, root included.
        seconds: about how long it may take.
    """
    grid = {point: tuple(w for w in widths if w <= widest) for point, widths in QUICK_GRID.items()}
    return _measure(timer, drafter, target, grid=grid, turns=3, dearest=2.2, seconds=seconds)


def policy_of(
    target: TargetModel, drafter: Drafter, folder: Path | None = None, *, idle: bool = True
) -> Policy | None:
    """Return a policy for a pair, from what was measured and learnt before; measure first where nothing was.

    Args:
        target: to verify with.
        drafter: to draft with.
        folder: the drafter's; its `acceptance.json` serves where this user's runs have learnt nothing.
        idle: nothing runs on the pair, so that it may be measured.

    Returns:
        None while nothing was measured, or where it cannot be for a short context or little memory.
    """
    wanted = cache.key(target, drafter)
    try:
        latency = cache.obtain(wanted, lambda: quick(target, drafter)) if idle else cache.load(wanted)
    except (ConfigError, CacheMemoryError, torch.OutOfMemoryError):
        return None
    return None if latency is None else Policy(latency, cache.recall_acceptance(wanted, folder))


def _on_target(target: TargetModel, drafter: Drafter | None, **options: Any) -> LatencyTable:
    if not target.verifies_trees:
        raise UnsupportedModelError(
            f"draft trees cannot be verified on {type(target.model).__name__}: there is nothing to calibrate"
        )
    before = target.feature_layers
    target.use_features(drafter.feature_layers if drafter else ())
    try:
        return _measure(TargetTimer(target), drafter, target, **options)
    except torch.OutOfMemoryError as error:
        raise CacheMemoryError(
            f"{target.device} ran out of memory while measuring: give fewer rows, shorter contexts or fewer nodes"
        ) from error
    finally:
        target.use_features(before)


def _measure(
    timer: VerifyTimer,
    drafter: Drafter | None,
    target: Any,
    *,
    grid: Mapping[tuple[int, int], Sequence[int]],
    turns: int,
    dearest: float,
    seconds: float = float("inf"),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatencyTable:
    """Draft and verify in turns at all points of a grid, or at as many as there is time for.

    Args:
        timer: times verification.
        drafter: to draft with.
        target: the target that the drafter drafts for.
        grid: widths in ascending order by (rows, context).
        turns: measurements of each point, besides a first one, which warms up and counts where there is no other.
        dearest: a tree that costs so many times the root is the widest that is measured.
        seconds: how long it may take.
        progress: called with how much is done, of how much.
    """
    ends = time.perf_counter() + seconds
    todo = {(rows, min(own, timer.longest)): tuple(widths) for (rows, own), widths in grid.items()}
    drafting = None if drafter is None else DraftTimer(drafter, target, max(own for _, own in todo))
    verify: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    drafts: dict[str, list[Sample]] = {part.name: [] for part in parts_of(drafter)}
    cut_short, root = False, 0.0
    try:
        for turn in range(turns + 1):
            order = 1 if turn % 2 else -1
            for done, (rows, context) in enumerate(list(todo) if turn == 0 else list(todo)[::order]):
                timer.setup(rows, context)
                if drafting is not None:
                    drafting.setup(rows, context)
                widths = todo[rows, context]
                for place, width in enumerate(widths if turn == 0 else widths[::order]):
                    # Without the slope from one width to another there is nothing to decide by.
                    if time.perf_counter() > ends and len(verify) >= 4:
                        cut_short = True
                        break
                    for name, own in drafts.items():
                        if drafting is not None and width > 1:
                            own.append(Sample(width, rows, context, drafting.draft(width, (name,))))
                    took = timer.verify(width)
                    if turn == 0 and (place == 0 or took > dearest * root):
                        # The first pass of a shape may have had something to set up.
                        took = min(took, timer.verify(width))
                    verify[rows, context, width].append(took)
                    root = took if place == 0 else root
                    if turn == 0 and took > dearest * root:
                        todo[rows, context] = widths[: place + 1]
                        break
                progress(turn * len(todo) + done + 1, len(todo) * (turns + 1))
    finally:
        if drafting is not None:
            drafting.close()
    samples = [
        Sample(point[2], *point[:2], own) for point, each in verify.items() for own in each[1:] or each
    ]
    machine = {
        **cache.key(target, drafter),
        "turns": turns,
        CUT_SHORT: cut_short,
        "date": date.today().isoformat(),
    }
    return LatencyTable(samples, drafts, machine=machine)


def uneven_tokens(length: int, vocab_size: int) -> list[int]:
    """Return token ids as uneven as those of a text, a few of them frequent, so that n-grams find matches."""
    random = np.random.default_rng(0)
    ids = random.permutation(vocab_size)
    return [int(ids[min(rank, vocab_size) - 1]) for rank in random.zipf(1.5, size=length)]


def binary_tree(width: int, rows: int, tokens: list[int], device: torch.device) -> DraftTree:
    """Return a binary tree of `width` nodes for each row, of the tokens in their order."""
    places = torch.arange(width, device=device)
    depths = (places + 1).log2().floor().long()
    columns = (
        torch.tensor(tokens[:width], device=device),
        (places - 1).clamp(min=0) // 2,
        depths,
        -depths.float(),
    )
    ids, parents, levels, scores = (column.expand(rows, width) for column in columns)
    return DraftTree(ids, parents, levels, scores, [width] * rows)


def _seconds(device: torch.device, action: Callable[[], Any]) -> float:
    """Return the seconds of an action, an accelerator's work included."""
    _wait(device)
    started = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _ascending(name: str, values: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """Return the values without repetition. Raises ConfigError unless they are whole numbers in low..high."""
    if not values:
        raise ConfigError(f"{name} is empty: give at least one number")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} holds {value!r}: give whole numbers in {low}..{high}")
    return tuple(sorted(set(values)))
