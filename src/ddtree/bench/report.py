"""The report of a benchmark: tables for a terminal and for a Markdown document, and pictures drawn with matplotlib."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddtree.bench.methods import OFF
from ddtree.bench.results import Results
from ddtree.bench.tables import PARTS, RunStats, all_stats, inline, tables
from ddtree.errors import ConfigError

Draw = Callable[[Any], None]
"""Draws on a pair of axes."""
_END = "<!-- end of figures -->"


def terminal(results: Results) -> str:
    """Return the tables that fit a terminal, and what they were measured on."""
    shown = [table.text() for table in tables(results) if not table.detail]
    return "\n\n".join([*_facts(results), *shown, *_remarks(results)])


def markdown(results: Results, source: str, plots: Sequence[str]) -> str:
    """Return a part of a document, between two comments of which the first one names the file of results.

    Args:
        source: the file, relative to the document's folder.
        plots: pictures, likewise.
    """
    pictures = [f"![{Path(plot).stem.replace('-', ' ')}]({plot})" for plot in plots]
    facts = [f"- {inline(fact)}" for fact in _facts(results)]
    parts = [_begin(source), "\n".join([*facts, f"- raw figures: [{source}]({source})"])]
    parts += [table.markdown() for table in tables(results)]
    return "\n\n".join([*parts, *map(inline, _remarks(results)), *pictures, _END])


def write(path: Path, results_path: Path, results: Results, plots: Sequence[Path]) -> None:
    """Put the part for a file of results into a document: in place of the one before, or at its end.

    The rest of the document is left as it is. Raises ConfigError when it cannot be written.
    """
    source, *pictures = (Path(os.path.relpath(one, path.parent)).as_posix() for one in (results_path, *plots))
    part = markdown(results, source, pictures)
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
        pattern = re.escape(_begin(source)) + ".*?" + re.escape(_END)
        after, found = re.subn(pattern, lambda _: part, before, flags=re.DOTALL)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(after if found else f"{before.rstrip()}\n\n{part}\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be written ({why}): name another file with --markdown") from error


def _begin(source: str) -> str:
    return f"<!-- figures of {source} -->"


def _facts(results: Results) -> list[str]:
    header, settings, machine = results.header, results.settings, results.header["machine"]
    accelerator = f"{machine['accelerator']}, " if machine.get("accelerator") else ""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    prompts, turns = len({run["id"] for run in results.runs}), settings["turns"]
    return [
        f"target {settings['target']}, drafter {settings['drafter']}, {settings['dtype']}; {header['date']}",
        f"{accelerator}{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['system']}; {versions}",
        f"{prompts} prompts of {' and '.join(settings['prompts'])}, at most {settings['max_tokens']} tokens, "
        f"measured {'once' if turns == 1 else f'{turns} times'}; command: `{header['command']}`",
    ]


def _remarks(results: Results) -> list[str]:
    lines = [
        'Decoding begins after the first token; "in all" includes the prompt. Ratios are medians over prompts of '
        "ratios within a turn. Quartiles are over prompts, noise over turns. tau pools all rounds."
    ]
    if results.skipped:
        names = ", ".join(dict.fromkeys(record["id"] for record in results.skipped))
        lines.append(f"Passed over, too long for the context: {names}.")
    for run in results.runs:
        verdict = run["verdict"]
        if verdict["kind"] == "different":
            lines.append(
                f"Different from off: {run['cell']}, {run['id']}, T={run['temperature']:g}, at token "
                f"{verdict['at']} (gap {verdict['gap']}, noise {verdict['noise']})."
            )
    return lines


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
