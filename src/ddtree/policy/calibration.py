"""Measures what rounds cost, on the path that rounds take.

As in rounds, a draft comes before each verification: either finds the processor's caches filled by the other. All
points are visited several times in alternating order, so that a slow spell touches one measurement of many points and
not all of one; the median of each point counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.drafters import Drafter, DraftRow, parts_of
from ddtree.errors import CacheMemoryError, ConfigError, UnsupportedModelError, is_whole
from ddtree.model import TargetModel, TargetWeights
from ddtree.policy import cache
from ddtree.policy.controller import Policy
from ddtree.policy.latency import CUT_SHORT, LatencyTable, Sample
from ddtree.stats import Clock
from ddtree.tree import MAX_BUDGET, MAX_DEPTH, DraftTree

# Nodes of a pass, root included. Reasoned: a cost curve bends by no more than a few percent between two of them; half
# as many would hide where it does, twice as many take twice as long.
WIDTHS = (1, 2, 3, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025)
# Tokens of context. Reasoned: time is linear in them, so that two would do; four bound the noise of the slope.
CONTEXTS = (32, 256, 768, 2048)
# Measurements of a point: half, and one slow spell of the machine may touch most of them; double takes twice as long.
TURNS = 7
# A tree that costs so many times the root is the widest that is measured. Reasoned: twice as wide a tree hardly ever
# pays, and half would leave out trees that do with a strong drafter. The brief form stops earlier to keep its time.
DEAREST, DEAREST_QUICK = 4.0, 2.2
# Widths by (rows, context), and turns, of the brief form: half would leave the slope to chance, double takes 5 seconds.
QUICK_GRID = {(1, 48): (1, 2, 9, 17, 33, 65, 129, 257, 513, 1025), (1, 512): (1, 9, 33)}
QUICK_TURNS = 3
# Tokens a round commits, which a drafter has to take in before it drafts. Reasoned: as good drafters make; half and
# double move the drafting time by what a few tokens take.
COMMITTED = 4


class TargetTimer:
    """Times verification by a target that gives a drafter its features.

    Attributes:
        longest: most committed tokens of a row that `setup` can give, e.g. 2048.

    Raises:
        UnsupportedModelError: trees cannot be verified on the target.
        ConfigError: the target's context is too short.
    """

    def __init__(self, target: TargetModel, drafter: Drafter | None = None) -> None:
        if not target.verifies_trees:
            raise UnsupportedModelError(
                f"draft trees cannot be verified on {type(target.model).__name__}: there is nothing to calibrate"
            )
        self.longest = target.max_context - MAX_DEPTH - 2
        if self.longest < 2:
            raise ConfigError(
                f"a context of {target.max_context} tokens is too short to calibrate: give {MAX_DEPTH + 4} or more"
            )
        self._target, self._before = target, target.feature_layers
        self._cache = target.new_cache()
        self._tokens = uneven_tokens(MAX_BUDGET + 1, target.vocab_size)
        target.use_features(drafter.feature_layers if drafter else ())

    def setup(self, rows: int, context: int) -> None:
        """Hold that many rows with `context` committed tokens on average."""
        while self._cache.rows > rows:
            self._cache.drop_row(self._cache.rows - 1)
        while self._cache.rows < rows:
            self._cache.add_row()
        # The values in the cache have no bearing on time. Rows of a batch differ in length, which takes other paths.
        pairs, odd = divmod(rows, 2)
        self._cache.lengths[:] = [context - 1, context + 1] * pairs + [context] * odd

    def verify(self, width: int) -> float:
        """Return the seconds of verifying a binary tree of `width` nodes for each row."""
        tree = binary_tree(width, self._cache.rows, self._tokens, self._target.device)
        return _seconds(self._target.device, lambda: self._target.verify(self._cache, tree))

    def close(self) -> None:
        """Let the target give the features that it gave before."""
        self._target.use_features(self._before)


class DraftTimer:
    """Times drafting. The drafter may hold no rows before; `close` leaves it without.

    Args:
        drafter: a drafter.
        target: the target that the drafter drafts for.
        longest: most committed tokens of a row at `setup`.
    """

    def __init__(self, drafter: Drafter, target: Any, longest: int) -> None:
        self._drafter = drafter
        self._target = target
        self._tokens = uneven_tokens(longest + _growth(longest), target.vocab_size)
        shape = len(self._tokens), len(drafter.feature_layers) * target.hidden_size
        self._features = torch.randn(shape, dtype=target.dtype, device=target.device)
        self._rows = self._context = self._length = 0

    def setup(self, rows: int, context: int) -> None:
        """Hold that many rows of about `context` committed tokens, and draft once, so that they are processed."""
        self.close()
        self._context, self._length = context, 0
        for _ in range(rows):
            self._drafter.add_row()
            self._rows += 1
        self._commit(context)
        self.draft(2, None)

    def draft(self, width: int, members: tuple[str, ...] | None) -> float:
        """Return the seconds of drafting `width` - 1 nodes for each row."""
        depth = min(MAX_DEPTH, self._drafter.max_depth)
        text = self._tokens[: self._length + 1]
        rows = [DraftRow(list(text), width - 1, depth, members=members) for _ in range(self._rows)]
        return _seconds(self._target.device, lambda: self._drafter.draft(rows, Clock()))

    def next_round(self) -> None:
        """Commit as many tokens as a round does; begin anew where the text has left its context."""
        longest = min(self._context + _growth(self._context), self._target.max_context)
        if self._length + 2 * COMMITTED > longest:
            self.setup(self._rows, self._context)
        self._commit(COMMITTED)

    def close(self) -> None:
        """Free the drafter's rows."""
        while self._rows:
            self._rows -= 1
            self._drafter.drop_row(self._rows)

    def _commit(self, count: int) -> None:
        new = slice(self._length, self._length + count)
        features = self._features[new] if self._drafter.feature_layers else None
        for row in range(self._rows):
            self._drafter.observe(row, self._tokens[new], features)
        self._length += count


def _growth(context: int) -> int:
    """Return the tokens that a text may grow by before it counts as another context."""
    return max(16, context // 8)


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
        rows: batch sizes, e.g. (1, 2, 4, 8).
        contexts: committed tokens a row, 2 or more; those beyond the target's context are cut to it.
        widths: nodes a row, root included, 1..1025; by default up to where a pass costs four times the root's.
        turns: measurements of each point after a first one, which warms up.
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
    dearest = DEAREST if widths is None else float("inf")
    return _measure(target, drafter, grid, turns, dearest, progress=progress)


def quick(
    target: Any,
    drafter: Drafter | None = None,
    *,
    timer: Any = None,
    widest: int = MAX_BUDGET + 1,
    seconds: float = 2.5,
) -> LatencyTable:
    """Measure briefly, one row at a time, for first use; with the same errors as `thorough`.

    Args:
        target: to verify with.
        drafter: to draft with.
        timer: times verification where another engine than ours verifies, with the methods of `TargetTimer`; closed
            afterwards.
        widest: most nodes of a row, root included.
        seconds: about how long it may take. On a slow model, or a busy machine, fewer points and turns are measured,
            and `machine["cut_short"]` is true.
    """
    grid = {point: tuple(width for width in own if width <= widest) for point, own in QUICK_GRID.items()}
    return _measure(target, drafter, grid, QUICK_TURNS, DEAREST_QUICK, timer=timer, seconds=seconds)


def policy_of(
    target: TargetWeights,
    drafter: Drafter,
    folder: Path | None = None,
    *,
    idle: bool = True,
    measure: Callable[[], LatencyTable] | None = None,
    **named: str,
) -> Policy | None:
    """Return a policy for a pair, from what was measured and learnt before; measure first where nothing was.

    Args:
        target: to verify with.
        drafter: to draft with.
        folder: the drafter's; its `acceptance.json` serves where this user's runs have learnt nothing.
        idle: nothing runs on the pair, so that it may be measured.
        measure: measures it; `quick` by default.
        named: more that its times depend on, e.g. `runtime="vLLM 0.32.0"`; added to the key.

    Returns:
        None while nothing was measured, or where it cannot be for a short context or little memory.
    """
    wanted = cache.key(target, drafter) | named
    measure = measure or partial(quick, target, drafter)
    try:
        latency = cache.obtain(wanted, measure) if idle else cache.load(wanted)
    except (ConfigError, CacheMemoryError):
        return None
    return None if latency is None else Policy(latency, cache.recall_acceptance(wanted, folder))


def _measure(
    target: Any,
    drafter: Drafter | None,
    grid: Mapping[tuple[int, int], Sequence[int]],
    turns: int,
    dearest: float,
    *,
    timer: Any = None,
    seconds: float = float("inf"),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatencyTable:
    """Draft and verify in turns at all points of a grid of widths in ascending order, or as many as there is time for.

    Args:
        target: that the drafter drafts for.
        drafter: to draft with.
        grid: widths by (rows, context).
        turns: measurements of each point after a first one, which warms up.
        dearest: a tree that costs so many times the root is the widest that is measured.
        timer: times verification; by default by the target.
        seconds: how long it may take.
        progress: called with how much is done, of how much.
    """
    ends = time.perf_counter() + seconds
    verify: list[Sample] = []
    drafts: dict[str, list[Sample]] = {part.name: [] for part in parts_of(drafter)}
    cut_short, root = False, 0.0
    with _memory(target.device), ExitStack() as opened:
        verifying = opened.enter_context(closing(timer or TargetTimer(target, drafter)))
        todo = {(rows, min(length, verifying.longest)): tuple(own) for (rows, length), own in grid.items()}
        drafting: DraftTimer | None = None
        if drafter is not None:
            longest = max(context for _, context in todo)
            drafting = opened.enter_context(closing(DraftTimer(drafter, target, longest)))
        for turn in range(turns + 1):
            order = -1 if turn > 0 and turn % 2 == 0 else 1
            for done, (rows, context) in enumerate(list(todo)[::order], turn * len(todo) + 1):
                verifying.setup(rows, context)
                if drafting is not None:
                    drafting.setup(rows, context)
                for width in (widths := todo[rows, context])[::order]:
                    # Without the slope from one width to another there is nothing to decide by.
                    if time.perf_counter() > ends and len(verify) >= 4:
                        cut_short = True
                        break
                    if drafting is not None and width > 1:
                        for name, own in drafts.items():
                            drafting.next_round()
                            own.append(Sample(width, rows, context, drafting.draft(width, (name,))))
                    took = verifying.verify(width)
                    if turn == 0 and (width == widths[0] or took > dearest * root):
                        # The first pass of a shape may have had something to set up.
                        took = min(took, verifying.verify(width))
                        root = took if width == widths[0] else root
                    verify.append(Sample(width, rows, context, took))
                    if turn == 0 and took > dearest * root:
                        todo[rows, context] = widths[: widths.index(width) + 1]
                        break
                progress(done, len(todo) * (turns + 1))
    about = {"turns": turns, CUT_SHORT: cut_short, "date": date.today().isoformat()}
    return LatencyTable(verify, drafts, machine={**cache.key(target, drafter), **about})


@contextmanager
def _memory(device: torch.device) -> Iterator[None]:
    """Raise CacheMemoryError where memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CacheMemoryError(
            f"{device} ran out of memory while measuring: give fewer rows, shorter contexts or fewer nodes"
        ) from error


def uneven_tokens(length: int, vocab_size: int) -> list[int]:
    """Return token ids as uneven as those of a text, a few of them frequent, so that n-grams find matches."""
    random = np.random.default_rng(0)
    ids = random.permutation(vocab_size)
    return [int(ids[min(rank, vocab_size) - 1]) for rank in random.zipf(1.5, size=length)]


def binary_tree(width: int, rows: int, tokens: list[int], device: torch.device) -> DraftTree:
    """Return a binary tree of `width` nodes for each row, of the tokens in their order."""
    places = torch.arange(width, device=device)
    depths = (places + 1).log2().floor().long()
    ids = torch.tensor(tokens[:width], device=device)
    columns = ids, (places - 1).clamp(min=0) // 2, depths, -depths.float()
    ids, parents, depths, logprobs = (column.expand(rows, width) for column in columns)
    return DraftTree(ids, parents, depths, logprobs, [width] * rows)


def _seconds(device: torch.device, action: Callable[[], Any]) -> float:
    """Return the seconds of an action, an accelerator's work included."""
    wait = (lambda: None) if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    wait()
    started = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - started


def _ascending(name: str, values: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """Return the values without repetition. Raises ConfigError unless they are whole numbers in low..high."""
    if not values:
        raise ConfigError(f"{name} is empty: give at least one number")
    for value in values:
        if not (is_whole(value) and low <= value <= high):
            raise ConfigError(f"{name} holds {value!r}: give whole numbers in {low}..{high}")
    return tuple(sorted(set(values)))
