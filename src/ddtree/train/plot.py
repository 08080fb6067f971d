"""The step `plot` of `ddtree train`: pictures of a work folder's logs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.export import HEADS
from ddtree.train.fit import LOG
from ddtree.train.log import read_log

FIT = "fit"


def plot(work: Path) -> list[Path]:
    """Draw training loss, held-out loss and tokens per round over the minutes; returns the files.

    Raises:
        ConfigError: matplotlib is missing.
        CheckpointError: there is no log.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib: pip install 'ddtree[bench]'")
    logs = {name: read_log(work / name / LOG) for name in (FIT, HEADS)}
    if not any(logs.values()):
        raise CheckpointError(f"{work / FIT / LOG} holds nothing; run `ddtree train fit` first")
    return [_draw(lines, work / f"{name}.png") for name, lines in logs.items() if lines]


def _draw(lines: list[dict[str, Any]], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(name for line in lines for name in line):
        measured, _, module = name.partition(".")
        if measured in ("loss", "held_out", "tau"):
            axes = right if measured == "tau" else left
            label = {"loss": "training", "held_out": "held out", "tau": "chain"}[measured]
            points = [(line["seconds"] / 60, line[name]) for line in lines if name in line]
            axes.plot(
                *zip(*points, strict=True), label=f"{label} {module}".strip(), marker="." * (len(points) < 2)
            )
    left.set_ylabel("loss")
    right.set_ylabel("tokens a round, held out")
    for axes in (left, right):
        axes.set_xlabel("minutes")
        axes.legend()
    figure.savefig(path, dpi=120)
    return path
