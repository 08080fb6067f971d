"""The figures as pictures."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree.bench import cells
from ddtree.bench.figures import Figures, median
from ddtree.bench.raw import Raw
from ddtree.errors import ConfigError

_PARTS = ("draft", "build", "verify", "walk", "commit")


def check() -> None:
    """Raise ConfigError where no picture can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'ddtree[bench]'")


def draw(raw: Raw, folder: Path) -> list[Path]:
    """Draw what the figures hold; returns the files. Raises ConfigError: matplotlib is missing, a file fails."""
    check()
    everything = [Figures(raw, temperature) for temperature in raw.settings["temperatures"]]
    shown = [figures for figures in everything if figures.tasks]
    drawn: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, title, picture in _pictures(raw, shown):
            drawn.append(_save(folder / f"{name}.png", title, picture))
    except OSError as error:
        raise ConfigError(
            f"plots cannot be written to {folder} ({error.strerror or error}): name another folder"
        ) from error
    return drawn


Picture = Callable[[Any], None]


def _pictures(raw: Raw, everything: list[Figures]) -> list[tuple[str, str, Picture]]:
    found: list[tuple[str, str, Picture]] = []
    for figures in everything:
        at = f"T={figures.temperature:g}"
        slug = f"t{figures.temperature:g}".replace(".", "_")
        if budgets(figures):
            found += [
                (f"speedup-{slug}", f"Speedup of decoding by budget, {at}", _by_budget(figures, _speedup)),
                (f"tau-{slug}", f"Tokens a round by budget, {at}", _by_budget(figures, _tau)),
            ]
        if any(figures.accepted(cell) for cell in figures.columns[1:]):
            found.append((f"accepted-{slug}", f"Accepted tokens of a round, {at}", _accepted(figures)))
        found.append((f"round-{slug}", f"Time of a round, {at}", _rounds(figures)))
    if raw.latency is not None:
        found.append(("verification", "Verification: measured rounds and the fit", _latency(raw, everything)))
    return found


def budgets(figures: Figures) -> dict[int, str]:
    """Cells of a fixed tree of all drafters, by budget."""
    trees = {name: re.fullmatch(r"tree:(\d+)", name) for name in figures.columns}
    return dict(sorted((int(match[1]), name) for name, match in trees.items() if match))


def _save(path: Path, title: str, picture: Picture) -> Path:
    # The global state of pyplot, and its choice of a window system, stay untouched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    picture(axes)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


Value = Callable[[Figures, str, str | None], float | None]


def _speedup(figures: Figures, cell: str, task: str | None) -> float | None:
    return median(figures.ratios(cell, cells.PLAIN, task)) if task else figures.geometric(cell, cells.PLAIN)


def _tau(figures: Figures, cell: str, task: str | None) -> float | None:
    return figures.tau(cell, task)


def _by_budget(figures: Figures, value: Value) -> Picture:
    def picture(axes: Any) -> None:
        known = budgets(figures)
        for task in figures.tasks:
            axes.plot(list(known), [value(figures, cell, task) for cell in known.values()], lw=1, label=task)
        mean = [value(figures, cell, None) for cell in known.values()]
        axes.plot(list(known), mean, "k-o", lw=2, label="geometric mean" if value is _speedup else "all")
        for cell, style in (("chain", "--"), ("auto", ":"), ("tree:auto", "-.")):
            level = value(figures, cell, None) if cell in figures.columns else None
            if level is not None:
                axes.axhline(level, color="black", ls=style, lw=1, label=cell)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(known), [str(budget) for budget in known])
        axes.set_xlabel("budget (drafted nodes a round)")
        axes.set_ylabel("times as fast as off" if value is _speedup else "tokens a round")
        axes.legend(fontsize=7)

    return picture


def _accepted(figures: Figures) -> Picture:
    def picture(axes: Any) -> None:
        shown = [cell for cell in figures.columns[1:] if figures.accepted(cell)]
        deepest = max(max(figures.accepted(cell)) for cell in shown)
        for cell in shown:
            depths = figures.accepted(cell)
            share = [depths[depth] / depths.total() for depth in range(deepest + 1)]
            axes.plot(range(deepest + 1), share, marker=".", lw=1, label=cell)
        axes.set_xlabel("drafted tokens accepted in a round")
        axes.set_ylabel("share of rounds")
        axes.legend(fontsize=7)

    return picture


def _rounds(figures: Figures) -> Picture:
    def picture(axes: Any) -> None:
        shown = [cell for cell in figures.columns if figures.round_seconds(cell)]
        left = [0.0] * len(shown)
        for part in _PARTS:
            width = [figures.round_seconds(cell).get(part, 0.0) * 1e3 for cell in shown]
            axes.barh(shown, width, left=left, label=part)
            left = [start + size for start, size in zip(left, width, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds a round")
        axes.legend(fontsize=7)

    return picture


def _latency(raw: Raw, everything: list[Figures]) -> Picture:
    def picture(axes: Any) -> None:
        assert raw.latency is not None
        widest = 0.0
        for figures in everything:
            points = [
                (figures.nodes(cell), figures.round_seconds(cell).get("verify")) for cell in figures.columns
            ]
            known = [
                (nodes + 1, time * 1e3) for nodes, time in points if nodes is not None and time is not None
            ]
            axes.plot(*zip(*known, strict=True), "o", ms=4, label=f"cells, T={figures.temperature:g}")
            widest = max(widest, *(width for width, _ in known))
        fit = zip(raw.latency["widths"], raw.latency["seconds"], strict=True)
        shown = [(width, seconds * 1e3) for width, seconds in fit if width <= 1.3 * widest]
        axes.plot(*zip(*shown, strict=True), "k-", label="fit")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(f"nodes of a round, root included (context of {raw.latency['context']:.0f} tokens)")
        axes.set_ylabel("milliseconds of verification")
        axes.legend(fontsize=7)

    return picture
