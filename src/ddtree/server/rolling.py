"""Figures of the last while, for people who look on."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from ddtree.tree import MAX_DEPTH

if TYPE_CHECKING:
    from ddtree.engine import Round

_SECONDS = 30.0
_ROUNDS = 4096  # most rounds that are kept of that time
_ARM_ROUNDS = 256
_ANSWERS = 128
_NOTHING = (0, 0, 0.0)


class Rolling:
    """What the last 30 seconds' rounds, each arm's last 256 and the last 128 answers were like.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Any = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        # (when, rows, tokens, seconds)
        self._rounds: deque[tuple[float, int, int, float]] = deque(maxlen=_ROUNDS)
        # (rows, tokens, seconds a row)
        self._arms: defaultdict[str, deque[tuple[int, int, float]]] = defaultdict(
            lambda: deque(maxlen=_ARM_ROUNDS)
        )
        self._ttft: deque[float] = deque(maxlen=_ANSWERS)
        self._tpot: deque[float] = deque(maxlen=_ANSWERS)
        self._depths = [0] * (MAX_DEPTH + 1)

    def round(self, done: Round) -> None:
        """Take a round in."""
        seconds = sum(done.seconds.values())
        made = [len(path) for path in done.paths]
        arms: dict[str, tuple[int, int, float]] = {}
        for choice, tokens in zip(done.choices, made, strict=True):
            rows, before, spent = arms.get(str(choice.arm), _NOTHING)
            arms[str(choice.arm)] = (rows + 1, before + tokens, spent + seconds)
        with self._lock:
            self._rounds.append((self._now(), len(made), sum(made), seconds))
            for tokens in made:
                self._depths[tokens - 1] += 1
            for name, figures in arms.items():
                self._arms[name].append(figures)

    def first(self, seconds: float) -> None:
        """A first token came so long after its submission."""
        with self._lock:
            self._ttft.append(seconds)

    def ended(self, tpot: float) -> None:
        """An answer ended that took so many seconds a token after the first."""
        with self._lock:
            self._tpot.append(tpot)

    def figures(self) -> dict[str, Any]:
        """As plain JSON values.

        `tau`: tokens a row and round; `tokens_per_second`: of all rows, in the time that rounds took; of an
        arm: of one row.
        """
        with self._lock:
            since = self._now() - _SECONDS
            lately = [entry[1:] for entry in self._rounds if entry[0] >= since]
            rows, tokens, seconds = _sums(lately)
            return {
                "tau": tokens / rows if rows else None,
                "tokens_per_second": tokens / seconds if seconds else None,
                "ttft_p50": _middle(self._ttft),
                "tpot_p50": _middle(self._tpot),
                "by_arm": {name: _arm(entries) for name, entries in self._arms.items()},
            }

    def accepted_per_depth(self) -> list[float]:
        """Of rounds of a row since the start, the share that accepted a node at depth 1, 2, ..."""
        with self._lock:
            total = sum(self._depths)
            return [sum(self._depths[depth:]) / total if total else 0.0 for depth in range(1, MAX_DEPTH + 1)]


def _arm(entries: Iterable[tuple[int, int, float]]) -> dict[str, Any]:
    rows, tokens, seconds = _sums(entries)
    return {
        "rounds": rows,
        "tau": tokens / rows,
        "tokens_per_second": tokens / seconds if seconds else None,
    }


def _sums(entries: Iterable[tuple[int, int, float]]) -> tuple[int, int, float]:
    rows = tokens = 0
    seconds = 0.0
    for entry in entries:
        rows, tokens, seconds = rows + entry[0], tokens + entry[1], seconds + entry[2]
    return rows, tokens, seconds


def _middle(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
