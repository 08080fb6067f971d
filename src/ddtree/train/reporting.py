"""Saying how a fit goes."""

from __future__ import annotations

from ddtree.progress import ProgressLine
from ddtree.train.fit import Fit, FitConfig, HeldOut, Progress
from ddtree.train.group import Group


class Reporter:
    """One line: how far, time left, loss, and the last look at held-out answers (loss, tokens a round of a chain).

    Args:
        label: what is going on.
        config: the fit's settings.
    """

    def __init__(self, label: str, config: FitConfig) -> None:
        self._seconds = None if config.minutes is None else round(60 * config.minutes)
        total, unit = (config.steps, "steps") if self._seconds is None else (self._seconds, "s")
        self._line = ProgressLine(label, total, unit)
        self._look: dict[str, HeldOut] = {}

    def say(self, progress: Progress) -> None:
        self._look = progress.held_out or self._look
        parts = ["loss " + _of(progress.loss)]
        done = progress.step
        if self._seconds is not None:
            parts.insert(0, f"step {progress.step:,}")
            done = min(round(progress.seconds), self._seconds)
        if self._look:
            parts.append("held out " + _of({name: look.loss for name, look in self._look.items()}))
            parts.append("chain " + _of({name: look.chain for name, look in self._look.items()}, 2))
        self._line.update(done, ", ".join(parts))

    def close(self) -> None:
        self._line.close()


def run_fit(fit: Fit, label: str, config: FitConfig, group: Group) -> dict[str, HeldOut]:
    """Run a fit, saying how it goes in the process that speaks; returns the best looks."""
    if not group.main:
        return fit.run()
    reporter = Reporter(label, config)
    best = fit.run(reporter.say)
    reporter.close()
    return best


def _of(values: dict[str, float], digits: int = 3) -> str:
    if len(values) == 1:
        return f"{next(iter(values.values())):.{digits}f}"
    return " ".join(f"{name} {value:.{digits}f}" for name, value in values.items())
