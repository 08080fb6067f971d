"""What the rows of a cache can come to, in bytes, before they are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddtree.cache import KVCache


@dataclass(frozen=True)
class Holding:
    """A cache that keeps keys and values of every committed token of every row.

    Attributes:
        cache: as it is now.
        measure: gives the bytes of one column of one row; called once at the most.
        spare: most columns of a row that are not committed.
        longest: most committed tokens of a row, however long its text is.
        row: bytes kept of each row beside its columns.
    """

    cache: KVCache
    measure: Callable[[], int]
    spare: int
    longest: int
    row: int = 0

    @cached_property
    def token(self) -> int:
        """Bytes of one column of one row."""
        return self.measure()

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and columns of buffers that hold so many rows of texts of so many tokens."""
        return self.cache.shape(rows, min(tokens, self.longest) + self.spare)

    def bytes(self, rows: int, tokens: int) -> int:
        """Memory of so many rows of texts of so many tokens."""
        width, columns = self.shape(rows, tokens)
        return self.token * width * columns + self.row * rows

    def confine(self, rows: int, tokens: int, slack: int = 0) -> None:
        """Give memory back where growing to `shape` would take more than `bytes` and so many bytes more.

        Raises:
            CacheMemoryError: the device has no room for the smaller buffers beside the old ones.
        """
        width, columns = self.shape(rows, tokens)
        self.cache.confine(width, columns, self.token * width * columns + slack)


def token_bytes(target: Any) -> int:
    """Memory of the keys and values of a token; a `Target` is run once to see."""
    probe = target.new_cache(1)
    for _ in target.prefill(probe, probe.add_row(), [0]):
        pass
    return probe.token_bytes
