"""Report a training run: lines of figures in a file, and a progress bar."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ddtree.train.arguments import TrainConfig

LOG = "log.jsonl"
_STEPS_BETWEEN_LINES = 20
_SECONDS_BETWEEN_REFRESHES = 30.0  # where the output is a file: each refresh is one more line of it


@dataclass(frozen=True)
class HeldOutScore:
    """Result of an evaluation on held-out answers.

    Attributes:
        loss: mean weighted cross-entropy.
        tau: tokens per round of a chain started at every anchor, as in 1.6.
    """

    loss: float
    tau: float


@dataclass(frozen=True)
class TrainProgress:
    """State of a run after some step.

    Attributes:
        step: steps done.
        seconds: time used so far, that of earlier runs included.
        loss: mean training objective since the last report, by module.
        held_out: the evaluation made after this step, by module; None if there was none.
    """

    step: int
    seconds: float
    loss: dict[str, float]
    held_out: dict[str, HeldOutScore] | None


class TrainLog:
    """Shows a run on a progress bar, and appends to a file of JSON lines.

    Lines of steps that a killed run has lost are removed first.

    Args:
        path: of the file; its folder's name is the bar's label.
        config: says how long the run is, in steps or minutes.
        step: steps done by earlier runs.
        seconds: time that they took.
    """

    def __init__(self, path: Path, config: TrainConfig, step: int, seconds: float) -> None:
        kept = [line for line in read_log(path) if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._path = path
        self._limit = None if config.minutes is None else round(60 * config.minutes)
        total, unit = (config.steps, "steps") if self._limit is None else (self._limit, "s")
        self._bar = progress_bar(path.parent.name, total, unit, self._done(step, seconds))
        self._shown: dict[str, float] = {}

    def add(self, progress: TrainProgress, rate: float) -> None:
        """Show a step, and write down each 20th and each with an evaluation, with its learning rate.

        With one module a line has "loss", "held_out" and "tau", with several "loss.NAME" and so on.
        """
        single = len(progress.loss) == 1
        figures = {"loss" if single else f"loss.{name}": loss for name, loss in progress.loss.items()}
        for name, score in (progress.held_out or {}).items():
            suffix = "" if single and name in progress.loss else f".{name}"
            figures |= {f"held_out{suffix}": score.loss, f"tau{suffix}": score.tau}
        self._shown |= figures if self._limit is None else {"step": progress.step, **figures}
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(self._done(progress.step, progress.seconds) - self._bar.n)
        if progress.held_out or progress.step % _STEPS_BETWEEN_LINES == 0:
            line = {"step": progress.step, "seconds": round(progress.seconds, 2), "rate": rate, **figures}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """End the progress bar."""
        self._bar.close()

    def _done(self, step: int, seconds: float) -> int:
        return step if self._limit is None else min(round(seconds), self._limit)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log: none if there is no file, and not the last one if a kill cut it short."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def progress_bar(label: str, total: int, unit: str, done: int = 0) -> tqdm:
    """Return a progress bar on standard error, since standard output belongs to results.

    Args:
        label: name of the job, as in "fit".
        total: how much there is to do, as in 2000.
        unit: name of what is counted, as in "steps".
        done: what earlier runs have done, which the rate leaves out.
    """
    often = sys.stderr.isatty()
    return tqdm(
        desc=label,
        total=total,
        unit=f" {unit}",
        initial=done,
        mininterval=0.1 if often else _SECONDS_BETWEEN_REFRESHES,
        dynamic_ncols=often,
    )
