"""The rule for rows, kept by every list of per-row state: rows are packed, and the last takes a dropped one's place."""

from __future__ import annotations

from typing import Any


def drop_row(states: list[Any], row: int) -> None:
    """Remove the state of a row from a list with one entry for each; the last entry moves into its place."""
    last = states.pop()
    if row < len(states):
        states[row] = last
