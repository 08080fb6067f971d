"""Pictures of a benchmark's results, drawn with matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ddtree.bench.methods import OFF
from ddtree.bench.report import PARTS
from ddtree.bench.results import Results
from ddtree.bench.run_stats import RunStats, all_stats
from ddtree.errors import ConfigError

Draw = Callable[[Any], None]
"""Draws on a pair of axes."""


def check_matplotlib() -> None:
    """Raise ConfigError where no picture can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'ddtree[bench]'")


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw all pictures as PNG; return the files. Raises ConfigError: matplotlib is missing, a file fails."""
    check_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_save(folder / f"{name}.png", title, draw_on) for name, title, draw_on in _pictures(results)]
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"plots cannot be written to {folder} ({why}): name another folder") from error


def _save(path: Path, title: str, draw_on: Draw) -> Path:
    # Not pyplot: its global state and its choice of a window system stay untouched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    draw_on(axes)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def _pictures(results: Results) -> Iterator[tuple[str, str, Draw]]:
    """Yield name, title and drawing of each picture that the results allow."""
    everything = all_stats(results)
    for stats in everything:
        slug = f"t{stats.temperature:g}".replace(".", "_")
        if _trees(stats):
            yield f"speedup-{slug}", f"Speedup of decoding by budget, {stats.at}", partial(_speedups, stats)
            yield f"tau-{slug}", f"Tokens a round by budget, {stats.at}", partial(_taus, stats)
        if any(stats.accepted(cell) for cell in stats.columns[1:]):
            yield f"accepted-{slug}", f"Accepted tokens of a round, {stats.at}", partial(_accepted, stats)
        yield f"round-{slug}", f"Time of a round, {stats.at}", partial(_rounds, stats)
    if results.latency is not None:
        title = "Verification: measured rounds and the fit"
        yield "verification", title, partial(_verification, results.latency, everything)


def _trees(stats: RunStats) -> dict[int, str]:
    """Return the methods with a fixed tree of all drafters, by budget."""
    fixed = [
        spec for spec in stats.specs.values() if spec.name == f"tree:{spec.budget}" and not spec.adaptive
    ]
    return {int(spec.budget): spec.name for spec in sorted(fixed, key=lambda spec: int(spec.budget))}


def _speedups(stats: RunStats, axes: Any) -> None:
    def value(cell: str, task: str | None) -> float:
        return stats.ratio(cell, OFF, task) if task else stats.geometric(cell, OFF)

    _by_budget(stats, axes, value, "geometric mean")
    axes.set_ylabel("times as fast as off")


def _taus(stats: RunStats, axes: Any) -> None:
    _by_budget(stats, axes, stats.tau, "all")
    axes.set_ylabel("tokens a round")


def _by_budget(stats: RunStats, axes: Any, value: Callable[[str, str | None], float], mean: str) -> None:
    """Draw a line for each task and one for all, over the budgets of fixed trees."""
    trees = _trees(stats)
    for task in stats.tasks:
        axes.plot(list(trees), [value(cell, task) for cell in trees.values()], lw=1, label=task)
    axes.plot(list(trees), [value(cell, None) for cell in trees.values()], "k-o", lw=2, label=mean)
    for cell, style in (("chain", "--"), ("auto", ":"), ("tree:auto", "-.")):
        level = value(cell, None) if cell in stats.columns else math.nan
        if not math.isnan(level):
            axes.axhline(level, color="black", ls=style, lw=1, label=cell)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(trees), list(map(str, trees)))
    axes.set_xlabel("budget (drafted nodes a round)")


def _accepted(stats: RunStats, axes: Any) -> None:
    found = {cell: depths for cell in stats.columns[1:] if (depths := stats.accepted(cell))}
    places = range(max(max(depths) for depths in found.values()) + 1)
    for cell, depths in found.items():
        axes.plot(places, [depths[place] / depths.total() for place in places], marker=".", lw=1, label=cell)
    axes.set_xlabel("drafted tokens accepted in a round")
    axes.set_ylabel("share of rounds")


def _rounds(stats: RunStats, axes: Any) -> None:
    found = {cell: seconds for cell in stats.columns if (seconds := stats.round_seconds(cell))}
    left = [0.0] * len(found)
    for part in PARTS:
        width = [1e3 * seconds.get(part, 0.0) for seconds in found.values()]
        axes.barh(list(found), width, left=left, label=part)
        left = [start + size for start, size in zip(left, width, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a round")


def _verification(latency: dict[str, Any], everything: list[RunStats], axes: Any) -> None:
    """Draw verification times: what each method's rounds took, and the fitted curve."""
    widest = 0.0
    for stats in everything:
        rounds = [(stats.nodes(cell) + 1, stats.round_seconds(cell).get("verify")) for cell in stats.columns]
        known = [(width, 1e3 * seconds) for width, seconds in rounds if seconds is not None]
        axes.plot(*zip(*known, strict=True), "o", ms=4, label=f"cells, {stats.at}")
        widest = max(widest, *(width for width, _ in known))
    fit = zip(latency["widths"], latency["seconds"], strict=True)
    shown = [(width, 1e3 * seconds) for width, seconds in fit if width <= 1.3 * widest]
    axes.plot(*zip(*shown, strict=True), "k-", label="fit")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"nodes of a round, root included (context of {latency['context']:.0f} tokens)")
    axes.set_ylabel("milliseconds of verification")
