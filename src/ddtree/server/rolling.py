"""Figures of the last while, for people who look on."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from ddtree.tree import MAX_DEPTH

if TYPE_CHECKING:
    from ddtree.engine.engine import Round

_SECONDS = 10.0
_ROUNDS = 4096  # most rounds that are kept of that time
_ARM_ROUNDS = 256
_ANSWERS = 32  # of a kind
_NOTHING = (0, 0, 0.0)


class Rolling:
    """What the last 10 seconds' rounds, each arm's last 256, and the last 32 answers of a kind were like.

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
        # (seconds to the first token, seconds a token after it)
        self._drafted: deque[tuple[float, float]] = deque(maxlen=_ANSWERS)
        self._plain: deque[tuple[float, float]] = deque(maxlen=_ANSWERS)
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
            for tokens, size in zip(made, done.tree.sizes, strict=True):
                if size > 1:
                    self._depths[tokens - 1] += 1
            for name, figures in arms.items():
                self._arms[name].append(figures)

    def ended(self, ttft: float, tpot: float, *, drafted: bool) -> None:
        """An answer ended.

        Args:
            ttft: seconds from its submission to its first token.
            tpot: seconds a token after that.
            drafted: whether any of its rounds had a draft.
        """
        with self._lock:
            (self._drafted if drafted else self._plain).append((ttft, tpot))

    def figures(self) -> dict[str, Any]:
        """As plain JSON values.

        `tau`: tokens a row and round; `tokens_per_second`: of all rows, in the time that rounds took; of an
        arm: of one row; `drafted` and `plain`: medians of answers.
        """
        with self._lock:
            since = self._now() - _SECONDS
            lately = [entry[1:] for entry in self._rounds if entry[0] >= since]
            rows, tokens, seconds = _sums(lately)
            return {
                "tau": tokens / rows if rows else None,
                "tokens_per_second": tokens / seconds if seconds else None,
                "drafted": _medians(self._drafted),
                "plain": _medians(self._plain),
                "by_arm": {name: _arm(entries) for name, entries in self._arms.items()},
            }

    def accepted_per_depth(self) -> list[float]:
        """Of a row's rounds with a draft since the start, the share that accepted a node at depth 1, 2, ..."""
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


def _medians(answers: Collection[tuple[float, float]]) -> dict[str, Any]:
    ttfts, tpots = zip(*answers, strict=True) if answers else ((), ())
    return {
        "answers": len(ttfts),
        "ttft_p50": median(ttfts) if ttfts else None,
        "tpot_p50": median(tpots) if tpots else None,
    }
