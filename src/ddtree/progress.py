"""A line of progress with the time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class ProgressLine:
    """Says how far a long job is, on a terminal in one line that is rewritten, elsewhere as a line now and then.

    Args:
        label: what is going on.
        total: how much there is to do, in `unit`.
        unit: name of what is counted.
        stream: where to; standard error by default, since standard output belongs to results.
        every: seconds between lines.
    """

    def __init__(
        self, label: str, total: int, unit: str, stream: TextIO | None = None, every: float | None = None
    ) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._every = every if every is not None else (0.2 if self._live else 30.0)
        self._started = time.monotonic()
        self._first: int | None = None
        self._said = float("-inf")

    def update(self, done: int, note: str = "") -> None:
        """`done` of the total are done; `note` is added at the end."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = done, now
        if now - self._said < self._every and done < self._total:
            return
        self._said = now
        made, elapsed = done - self._first, now - self._started
        parts = [
            f"{self._label}: {done:,} of {self._total:,} {self._unit} ({min(1, done / self._total):.0%})"
        ]
        if made > 0 and elapsed > 0:
            rate = made / elapsed
            parts.append(f"{rate:,.1f}/s" if rate < 10 else f"{rate:,.0f}/s")
            parts.append(f"{_duration(max(0, self._total - done) / rate)} left")
        if note:
            parts.append(note)
        line = ", ".join(parts)
        print(
            f"\r\x1b[K{line}" if self._live else line,
            end="" if self._live else "\n",
            file=self._stream,
            flush=True,
        )

    def close(self) -> None:
        """End the line."""
        if self._live:
            print(file=self._stream, flush=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
