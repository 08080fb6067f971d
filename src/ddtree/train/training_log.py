"""Log a training run: lines of figures in a file, and a progress bar."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

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


LOG = "log.jsonl"


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
    """Appends to a file of JSON lines. Lines of steps after `step`, which a killed run has lost, are removed first."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [line for line in read_log(path) if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, progress: TrainProgress, rate: float) -> None:
        """Append a line: with one module "loss", "held_out" and "tau", with several "loss.NAME" and so on."""
        line = {"step": progress.step, "seconds": round(progress.seconds, 2), "rate": rate}
        single = len(progress.loss) == 1
        for name, loss in progress.loss.items():
            line["loss" if single else f"loss.{name}"] = loss
        for name, score in (progress.held_out or {}).items():
            suffix = "" if single and name in progress.loss else f".{name}"
            line |= {f"held_out{suffix}": score.loss, f"tau{suffix}": score.tau}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log: none if there is no file, and not the last one if a kill cut it short."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


class TrainProgressLine:
    """Shows the steps or the time of a run with its loss and the last scores on held-out answers.

    Args:
        label: name of the run, as in "fit".
        steps: of the whole run.
        minutes: of the whole run, or None if it is measured in steps.
    """

    def __init__(self, label: str, steps: int, minutes: float | None) -> None:
        self._limit = None if minutes is None else round(60 * minutes)
        self._line = ProgressLine(label, self._limit or steps, "s" if self._limit else "steps")
        self._scores: dict[str, HeldOutScore] = {}

    def update(self, progress: TrainProgress) -> None:
        """Show the state after a step."""
        self._scores = progress.held_out or self._scores
        parts = [f"step {progress.step:,}"] if self._limit else []
        parts.append("loss " + _listed(progress.loss))
        if self._scores:
            parts.append("held out " + _listed({name: score.loss for name, score in self._scores.items()}))
            parts.append("chain " + _listed({name: score.tau for name, score in self._scores.items()}))
        done = min(round(progress.seconds), self._limit) if self._limit else progress.step
        self._line.update(done, ", ".join(parts))

    def close(self) -> None:
        """End the line."""
        self._line.close()


def _listed(values: dict[str, float]) -> str:
    if len(values) == 1:
        return f"{next(iter(values.values())):.3f}"
    return " ".join(f"{name} {value:.3f}" for name, value in values.items())
