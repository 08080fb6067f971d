"""The target's features of texts whose keys and values the engine may still hold."""

from __future__ import annotations

from torch import Tensor

from ddtree.engine.prefix_cache import PrefixStore
from ddtree.model.kv_cache import Columns


class FeatureStore:
    """Features by the tokens they belong to, within a bound of memory; rows follow the drafter's.

    The engine's prefix cache spares a prompt's beginning, and with it the features that a drafter wants of it.

    Args:
        limit: most bytes.
    """

    def __init__(self, limit: int) -> None:
        self._store = PrefixStore(limit, features=True)

    def find(self, tokens: list[int]) -> list[Tensor]:
        """Features [n, F * H], in parts, of the longest beginning of a text that is known."""
        return [part.features for part in self._store.find(tokens) if part.features is not None]

    def add_row(self, tokens: list[int], features: list[Tensor]) -> None:
        """Open a row at the end with the features of its prompt, or of as many of its last tokens as are known."""
        self._store.add_row(tokens, _no_columns, features)

    def observe(self, row: int, features: Tensor) -> None:
        """Take the features [n, F * H] of what a row's text went on with."""
        self._store.observe(row, features)

    def drop_row(self, row: int, tokens: list[int]) -> None:
        """Keep a row's text, and forget the row."""
        self._store.drop_row(row, tokens, _no_columns)


def _no_columns(start: int, stop: int) -> Columns:
    """Keys and values stay with the engine."""
    return []
