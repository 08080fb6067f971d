"""The drafter protocol: what proposes tokens. A drafter never decides; nothing it does can change the output.

Beside the protocol this file holds what is true of any drafter: the drafters that it merges, the memory that it may
take, and the one model that may use it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.model.kv_cache import KVFootprint
from ddtree.sampling.noise import Noise
from ddtree.stats import Clock
from ddtree.tree import DraftTree


@dataclass
class DraftRow:
    """Describes one row of the batch to a drafter, and says how much to draft for it.

    Attributes:
        tokens: prompt and output; the last is the bonus token, at absolute position len(tokens) - 1.
        budget: most nodes besides the root, as 16.
        depth: most depth this round, as 7; 0 leaves the root alone.
        chain: a single path (width 1) is wanted.
        noise: the row's Gumbel noise when it samples, for coupled drafting; a node of depth d has the position
            len(tokens) - 1 + d. None for greedy rows.
        temperature: the row's sampling temperature; 0 for greedy rows.
        members: names of those of several drafters that may draft for this row; None for all.
    """

    tokens: list[int]
    budget: int
    depth: int
    chain: bool = False
    noise: Noise | None = field(default=None, repr=False)
    temperature: float = 0.0
    members: tuple[str, ...] | None = None

    def names(self, drafter: Drafter) -> bool:
        """Return whether a drafter may draft for this row."""
        return self.members is None or drafter.name in self.members


def keep_chains(scores: Tensor, rows: list[DraftRow]) -> None:
    """Leave rows that want a chain the first child alone, of each place of scores [R, ..., C]."""
    for index, row in enumerate(rows):
        if row.chain:
            scores[index, ..., 1:] = float("-inf")


class Drafter(Protocol):
    """Proposes draft trees. Rows follow the target's cache: packed, and the last row takes the place of a dropped one.

    A drafter that keeps keys and values of its rows is a `KVHolder` as well, and one that may lag behind a row's text
    is a `LaggingDrafter`. One that is made of others lists them as `drafters`, and the trees that each of them drafted
    last as `proposals`.

    Attributes:
        name: as it appears in statistics and in the names of arms.
        feature_layers: target layers (0-based) whose outputs `observe` gets, in this order.
        max_depth: deepest level that it can draft.
    """

    name: str
    feature_layers: tuple[int, ...]
    max_depth: int

    def add_row(self) -> None:
        """Open an empty row at the end."""

    def drop_row(self, row: int) -> None:
        """Forget a row wholly; the last row takes its index.

        Raises:
            IndexError: there is no such row.
        """

    def observe(self, row: int, tokens: list[int], features: Tensor | None) -> None:
        """Take tokens newly committed to the target's cache, with their features [len(tokens), F * H]."""

    def draft(self, rows: list[DraftRow], clock: Clock) -> DraftTree:
        """Propose a tree for each row, 0..R-1. Drafts leave no trace: calling it twice changes nothing."""


@runtime_checkable
class KVHolder(Protocol):
    """A drafter that keeps something of every token of its rows on the device."""

    def kv_footprints(self) -> list[KVFootprint]:
        """Return its caches, each with the most memory that it can take."""


@runtime_checkable
class LaggingDrafter(Protocol):
    """A drafter that may need several rounds to process the committed tokens of a row.

    Attributes:
        lagging_rows: rows that the last `draft` was asked for and left out, because their texts are not processed yet.
    """

    lagging_rows: list[int]


def parts_of(drafter: Any) -> list[Any]:
    """Return the drafters that a drafter merges, or the drafter itself; none of None."""
    return [] if drafter is None else list(getattr(drafter, "drafters", [drafter]))


def with_parts(drafter: Any) -> list[Any]:
    """Return a drafter and all that it merges, at any depth; none of None."""
    if drafter is None:
        return []
    return [drafter, *(inner for part in getattr(drafter, "drafters", ()) for inner in with_parts(part))]


def kv_footprints_of(drafter: Any) -> list[KVFootprint]:
    """Return the caches of a drafter and of all that it merges, each with the most memory that it can take."""
    return [
        footprint
        for part in with_parts(drafter)
        if isinstance(part, KVHolder)
        for footprint in part.kv_footprints()
    ]


def lagging_rows_of(drafter: Any) -> set[int]:
    """Return the rows that a drafter, or one that it merges, left out of its last draft: their texts come first."""
    return {
        row for part in with_parts(drafter) if isinstance(part, LaggingDrafter) for row in part.lagging_rows
    }


# The user of each drafter, by the drafter's id. A user holds its drafters, so that an id stays theirs for as long as
# the user lives.
_users: WeakValueDictionary[int, Any] = WeakValueDictionary()
_lock = threading.Lock()


def claim(drafter: Any, user: object) -> None:
    """Make `user`, which must hold `drafter`, the only one that may use it and the drafters that it merges.

    A drafter keeps state of every row, so two users would spoil each other's.

    Raises:
        ConfigError: the drafter, or one that it merges, is in use elsewhere.
    """
    parts = with_parts(drafter)
    with _lock:
        for part in parts:
            if _users.get(id(part), user) is not user:
                raise ConfigError(
                    f"the drafter {part.name!r} is in use by another model and keeps state of its rows: make one for "
                    "each model, or close the other first"
                )
        for part in parts:
            _users[id(part)] = user


def release(drafter: Any, user: object) -> None:
    """Let others use what `user` has claimed; what it has not claimed stays as it is."""
    with _lock:
        for part in with_parts(drafter):
            if _users.get(id(part)) is user:
                del _users[id(part)]
