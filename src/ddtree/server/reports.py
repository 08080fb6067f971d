"""Rounds as plain values, for those who watch: what was drafted, and what of it was accepted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddtree.server.tokens import TokenTexts

if TYPE_CHECKING:
    from ddtree.engine.engine import Round

Watcher = Callable[[dict[str, Any]], None]
_EVERY = 0.05  # seconds between two reports
_TREE_EVERY = 0.1  # seconds between two trees
_IDLE_TREE_EVERY = 1.0  # while nobody watches
_log = logging.getLogger(__name__)


class Reports:
    """Tells watchers of rounds, at most 20 times a second.

    Args:
        texts: of a tree's tokens.
        now: a clock in seconds.

    Attributes:
        tree: the last tree that was written down, as in a report; None before.
    """

    def __init__(self, texts: TokenTexts, now: Callable[[], float] = time.monotonic) -> None:
        self.tree: dict[str, Any] | None = None
        self._untold: dict[str, Any] | None = None
        self._texts = texts
        self._now = now
        self._lock = threading.Lock()
        self._watchers: list[Watcher] = []
        self._told = self._drawn = float("-inf")
        self._rounds = self._tokens = 0

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` with each report, from the thread that decodes; returns what ends that."""
        with self._lock:
            self._watchers.append(watcher)
        return lambda: self._forget(watcher)

    def round(self, done: Round) -> None:
        """A round is over."""
        now = self._now()
        self._rounds += 1
        self._tokens += sum(map(len, done.paths))
        with self._lock:
            watchers = list(self._watchers)
        due = now - self._drawn >= (_TREE_EVERY if watchers else _IDLE_TREE_EVERY)
        if due and max(done.tree.sizes) > 1:
            self.tree = self._untold = self._written(done)
            self._drawn = now
        if not watchers or now - self._told < _EVERY:
            return
        report = {
            "t": time.time(),
            "rows": len(done.rows),
            "rounds": self._rounds,
            "made": self._tokens,
            "arm": ", ".join(dict.fromkeys(str(choice.arm) for choice in done.choices)),
            "accepted": [len(path) - 1 for path in done.paths],
            "nodes": [size - 1 for size in done.tree.sizes],
            "seconds": dict(done.seconds),
            "tree": self._untold,
        }
        self._told, self._untold, self._rounds, self._tokens = now, None, 0, 0
        for watcher in watchers:
            try:
                watcher(report)
            except Exception:
                _log.exception("a watcher failed and is told no more")
                self._forget(watcher)

    def _forget(self, watcher: Watcher) -> None:
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def _written(self, done: Round) -> dict[str, Any]:
        """The tree of the first row that has one."""
        row = next(index for index, size in enumerate(done.tree.sizes) if size > 1)
        tree = done.tree.row(row)
        return {
            "row": row,
            "tokens": [self._texts(token)[0] for token in tree.tokens[0].tolist()],
            "parents": tree.parents[0].tolist(),
            "depths": tree.depths[0].tolist(),
            "logprobs": [round(value, 4) for value in tree.logprobs[0].tolist()],
            "path": list(done.paths[row]),
            "next": self._texts(done.rows[row].tokens[-1])[0],
        }
