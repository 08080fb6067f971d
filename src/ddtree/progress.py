"""A progress bar for long jobs: tqdm with a rate that leaves out what an earlier run has done."""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 30.0  # where the output is a file: each refresh is one more line of it


class ProgressLine:
    """Show how far a job is, with the rate, the time left and a note.

    Args:
        label: name of the job, as in "fit".
        total: how much there is to do, as in 2000.
        unit: name of what is counted, as in "steps".
        stream: where to write; standard error by default, since standard output belongs to results.
    """

    def __init__(self, label: str, total: int, unit: str, stream: TextIO | None = None) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._stream = stream or sys.stderr
        self._bar: tqdm | None = None

    def update(self, done: int, note: str = "") -> None:
        """Show that `done` of the total are done. The first call sets where the rate counts from."""
        if self._bar is None:
            live = self._stream.isatty()
            self._bar = tqdm(
                desc=self._label,
                total=self._total,
                unit=f" {self._unit}",
                initial=done,
                file=self._stream,
                mininterval=0.1 if live else _SECONDS_BETWEEN_LINES,
                dynamic_ncols=live,
            )
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Draw the last state and end the line."""
        if self._bar is not None:
            self._bar.close()
