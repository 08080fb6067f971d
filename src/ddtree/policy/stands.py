"""Where single passes are timed: a target, or a drafter, that holds as many rows of as many tokens as is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.drafters import Drafter, DraftRow
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.stats import Clock
from ddtree.tree import MAX_DEPTH, DraftTree

_CHUNK = 128
_COMMITTED = 4  # tokens a round commits: what a drafter has to take in before it drafts


class Text:
    """Token ids to measure with, and the target's features of them.

    Args:
        tokens: token ids.
        features: [len(tokens), F * H]; None without feature layers.
    """

    def __init__(self, tokens: list[int], features: Tensor | None) -> None:
        self.tokens = tokens
        self._features = features

    def part(self, start: int, stop: int) -> tuple[list[int], Tensor | None]:
        """Tokens start..stop-1 with their features, counted around the end."""
        places = [place % len(self.tokens) for place in range(start, stop)]
        features = None if self._features is None else self._features[places]
        return [self.tokens[place] for place in places], features


class TargetStand:
    """Times verification.

    Args:
        target: a target; its feature layers are gathered as in rounds.
        longest: most committed tokens a row that will be wanted; cut to the target's context.
        enough: asked between the parts of the prefill; True ends it there.

    Attributes:
        text: what the first row was prefilled with; its length is the most that `occupy` can give.
    """

    def __init__(self, target: Target, longest: int, enough: Callable[[], bool] = lambda: False) -> None:
        self._target = target
        self._cache = target.new_cache()
        self._cache.add_row()
        longest = min(longest, target.max_context - MAX_DEPTH - 2)
        if longest < 2:
            raise ConfigError(
                f"a context of {target.max_context} tokens is too short to calibrate: give {MAX_DEPTH + 4} or more"
            )
        tokens: list[int] = []
        features: list[Tensor] = []
        wanted = uneven_tokens(longest, target.vocab_size)
        for part, forward in target.prefill(self._cache, 0, wanted, chunk=_CHUNK):
            tokens += part
            features += [] if forward.features is None else [forward.features[0]]
            if enough():
                break
        self.text = Text(tokens, torch.cat(features) if features else None)

    def occupy(self, rows: int, context: int) -> None:
        """Hold that many rows with `context` committed tokens on average."""
        while self._cache.rows > rows:
            self._cache.drop_row(self._cache.rows - 1)
        while self._cache.rows < rows:
            self._cache.add_row()
        # What the columns hold has no bearing on time. Rows of a batch differ in length, which takes paths of its own.
        lengths = [context + (1 if row % 2 else -1) for row in range(rows)]
        if rows % 2:
            lengths[-1] = context
        self._cache.lengths[:] = lengths

    def verify(self, width: int) -> float:
        """Seconds of verifying a tree of `width` nodes for each row."""
        cache, rows = self._cache, self._cache.rows
        tree = binary_tree(width, rows, self.text.tokens, self._target.device)
        lengths = list(cache.lengths)
        seconds = _seconds(self._target.device, lambda: self._target.verify(cache, tree))
        cache.commit([[0]] * rows)
        for row, length in enumerate(lengths):
            cache.truncate(row, length)
        return seconds


class DrafterStand:
    """Times drafting. The drafter may hold no rows before; `close` leaves it without.

    Args:
        drafter: a drafter.
        text: to draft after.
        target: that the drafter drafts for.
    """

    def __init__(self, drafter: Drafter, text: Text, target: Target) -> None:
        self._drafter = drafter
        self._text = text
        self._device = target.device
        self._limit = target.max_context
        self._held = 0
        self._rows = 0
        self._context = 0
        self._length = 0

    def occupy(self, rows: int, context: int) -> None:
        """Hold that many rows of about `context` committed tokens, and draft once, so that they are taken in."""
        self.close()
        self._rows, self._context, self._length = rows, context, context
        for row in range(rows):
            self._drafter.add_row()
            self._held += 1
            self._drafter.observe(row, *self._text.part(0, context))
        self._draft(2, None)

    def draft(self, width: int, members: tuple[str, ...] | None) -> float:
        """Seconds of drafting `width` - 1 nodes for each row, after as many tokens as a round commits.

        `members` are the parts of a merged drafter that shall draft; None for all.
        """
        for row in range(self._rows):
            self._drafter.observe(row, *self._text.part(self._length, self._length + _COMMITTED))
        self._length += _COMMITTED
        seconds = self._draft(width, members)
        longest = min(self._context + max(16, self._context // 8), self._limit)
        if self._length + _COMMITTED > longest:
            self.occupy(self._rows, self._context)
        return seconds

    def close(self) -> None:
        """Free the drafter's rows."""
        while self._held:
            self._held -= 1
            self._drafter.drop_row(self._held)

    def _draft(self, width: int, members: tuple[str, ...] | None) -> float:
        tokens, _ = self._text.part(0, self._length + 1)
        depth = min(MAX_DEPTH, self._drafter.max_depth)
        rows = [DraftRow(list(tokens), width - 1, depth, members=members) for _ in range(self._rows)]
        return _seconds(self._device, lambda: self._drafter.draft(rows, Clock()))


def uneven_tokens(length: int, vocab_size: int) -> list[int]:
    """Token ids as uneven as those of a text, a few of them frequent, so that lookups find what they look for."""
    random = np.random.default_rng(0)
    ids = random.permutation(vocab_size)
    return [int(ids[min(rank, vocab_size) - 1]) for rank in random.zipf(1.5, size=length)]


def binary_tree(width: int, rows: int, tokens: list[int], device: torch.device) -> DraftTree:
    """A binary tree of `width` nodes for each row, of the tokens in their order."""
    places = torch.arange(width, device=device)
    parents = (places - 1).clamp(min=0) // 2
    depths = (places + 1).log2().floor().long()
    ids = torch.tensor([tokens[place % len(tokens)] for place in range(width)], device=device)
    shape = (rows, width)
    scores = -depths.float()
    return DraftTree(
        ids.expand(shape), parents.expand(shape), depths.expand(shape), scores.expand(shape), [width] * rows
    )


def _seconds(device: torch.device, action: Callable[[], Any]) -> float:
    _finish(device)
    started = time.perf_counter()
    action()
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    """Wait for what an accelerator still has to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
