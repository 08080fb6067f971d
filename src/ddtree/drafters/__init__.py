"""The drafter protocol: whatever proposes. A drafter never decides; nothing it does can change the output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ddtree.model.kv_cache import Holding
from ddtree.sampling.sampler import Noise
from ddtree.stats import Clock
from ddtree.tree import DraftTree


@dataclass
class DraftRow:
    """What a drafter may see of one row of the batch.

    Attributes:
        tokens: prompt and output; the last is the bonus token, at absolute position len(tokens) - 1.
        budget: most nodes besides the root.
        depth: most depth this round; 0 leaves the root alone.
        chain: a single path (width 1) is wanted.
        noise: the row's Gumbel noise when it samples, for coupled drafting; a node of depth d stands at
            position len(tokens) - 1 + d. None for greedy rows.
        temperature: the row's sampling temperature; 0 for greedy rows.
        floor: log-probability below which a node is not worth drafting; a drafter may heed it where that saves time.
        members: names of those of several drafters that may draft for this row; None for all.
    """

    tokens: list[int]
    budget: int
    depth: int
    chain: bool = False
    noise: Noise | None = field(default=None, repr=False)
    temperature: float = 0.0
    floor: float = float("-inf")
    members: tuple[str, ...] | None = None


class Drafter(Protocol):
    """Rows follow the target's cache: packed, and the last row takes the place of a dropped one.

    A drafter that keeps keys and values of its rows is a `Holder` as well, and one that may be behind a row's text is
    a `Late` one.
    """

    name: str
    feature_layers: tuple[int, ...]
    max_depth: int

    def add_row(self) -> None:
        """Open an empty row at the end."""

    def drop_row(self, row: int) -> None:
        """Forget a row wholly; the last row takes its index."""

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Tokens newly committed to the target's cache, with their features [len(tokens), F * H]."""

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row, 0..R-1. Has no effect on later drafts: only `observe` moves a row on."""


@runtime_checkable
class Holder(Protocol):
    """A drafter that keeps something of every token of its rows on the device."""

    def holdings(self) -> list[Holding]:
        """Its caches, and what they can come to."""


@runtime_checkable
class Late(Protocol):
    """A drafter that may need several rounds to process what it was told of a row."""

    behind: list[int]
    """Rows that the last `draft` was asked for and did not draft, because their texts are not processed yet."""


def parts_of(drafter: Any) -> list[Any]:
    """The drafters that a drafter merges, or itself; none of None."""
    return [] if drafter is None else list(getattr(drafter, "drafters", [drafter]))


def with_parts(drafter: Any) -> list[Any]:
    """A drafter and all that it merges, at any depth; none of None."""
    if drafter is None:
        return []
    return [drafter, *(inner for part in getattr(drafter, "drafters", ()) for inner in with_parts(part))]


def holdings_of(drafter: Any) -> list[Holding]:
    """What a drafter and those that it merges keep of every token."""
    return [
        holding for part in with_parts(drafter) if isinstance(part, Holder) for holding in part.holdings()
    ]


def behind_of(drafter: Any) -> set[int]:
    """The rows that a drafter, or one that it merges, left out of its last draft to catch up with their texts first."""
    return {row for part in with_parts(drafter) if isinstance(part, Late) for row in part.behind}
