"""The tables of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ddtree.bench import cells
from ddtree.bench.figures import Figures, at_least, median, quartiles
from ddtree.bench.raw import Raw
from ddtree.bench.table import Table

PLAIN = cells.PLAIN
HF = "hf"
NONE = "-"
_PARTS = ("draft", "build", "verify", "walk", "commit")
_BOUND = 0.97  # a ratio from here on counts as no slower: the rest is noise


def tables(raw: Raw) -> list[Table]:
    """All tables: those of each temperature, then what was checked."""
    found: list[Table] = []
    everything = [Figures(raw, temperature) for temperature in raw.settings["temperatures"]]
    shown = [figures for figures in everything if figures.tasks]
    for figures in shown:
        found += _of_temperature(figures, raw.settings["baselines"])
    checks = _checks(shown, raw.settings["baselines"])
    return [*found, checks] if checks.rows else found


def _of_temperature(figures: Figures, baselines: list[str]) -> Iterator[Table]:
    yield _speedups(figures)
    yield _taus(figures)
    yield _speeds(figures)
    for cell in _adaptive(figures):
        yield _against(figures, cell, baselines)
    yield _rounds(figures)
    if figures.temperature > 0 and _uncoupled(figures):
        yield _coupling(figures)
    yield _detail(figures)


def _speedups(figures: Figures) -> Table:
    columns = figures.columns[1:]
    rows = [
        [task, *(_number(median(figures.ratios(cell, PLAIN, task))) for cell in columns)]
        for task in figures.tasks
    ]
    rows.append(["geometric mean", *(_number(figures.geometric(cell, PLAIN)) for cell in columns)])
    if HF in columns:
        rows.append(["geometric mean, over hf", *(_number(figures.geometric(cell, HF)) for cell in columns)])
    return Table(f"Speedup of decoding over off, {_at(figures)}", ["task", *columns], rows)


def _taus(figures: Figures) -> Table:
    columns = [cell for cell in figures.columns if cell != PLAIN and figures.tau(cell) is not None]
    rows = [[task, *(_number(figures.tau(cell, task)) for cell in columns)] for task in figures.tasks]
    rows.append(["all", *(_number(figures.tau(cell)) for cell in columns)])
    return Table(f"Tokens a round (tau), {_at(figures)}", ["task", *columns], rows)


def _speeds(figures: Figures) -> Table:
    header = [
        "cell", "tokens/s decoding", "tokens/s in all", "speedup decoding", "quartiles", "speedup in all",
        "nodes a round", "noise", "equal", "near-tie", "different",
    ]  # fmt: skip
    rows = []
    for cell in figures.columns:
        verdicts, noise = figures.verdicts(cell), figures.noise(cell)
        ratios = figures.ratios(cell, PLAIN)
        rows.append(
            [
                cell,
                _number(median(figures.speeds(cell)), 1),
                _number(median(figures.speeds(cell, span="total")), 1),
                _number(median(ratios)),
                _range(ratios),
                _number(median(figures.ratios(cell, PLAIN, span="total"))),
                _number(figures.nodes(cell), 1),
                NONE if noise is None else f"{noise:.1%}",
                *(str(verdicts[kind]) for kind in ("equal", "near-tie", "different")),
            ]
        )
    return Table(f"Speeds, medians over all prompts, {_at(figures)}", header, rows)


def _against(figures: Figures, cell: str, baselines: list[str]) -> Table:
    fixed = _rivals(cell, figures, baselines)
    chain = _chain_of(cell, figures)
    header = ["task", f"{cell} / off", f"{cell} / {chain or 'chain'}", "best fixed", f"{cell} / best fixed"]
    rows = []
    for task in figures.tasks:
        best = figures.best(fixed, PLAIN, task)
        rows.append(
            [
                task,
                _faster(figures.ratios(cell, PLAIN, task)),
                _faster(figures.ratios(cell, chain, task)) if chain else NONE,
                best or NONE,
                _faster(figures.ratios(cell, best, task)) if best else NONE,
            ]
        )
    return Table(f"{cell} against fixed choices, {_at(figures)}", header, rows)


def _rounds(figures: Figures) -> Table:
    rows = []
    for cell in figures.columns:
        seconds = figures.round_seconds(cell)
        if seconds:
            parts = [seconds.get(part, 0.0) for part in _PARTS]
            rows.append([cell, *(_number(part * 1e3) for part in parts)])
    return Table(f"Milliseconds of a round by part, {_at(figures)}", ["cell", *_PARTS], rows)


def _coupling(figures: Figures) -> Table:
    header = ["task"]
    pairs = _uncoupled(figures)
    for cell, _ in pairs:
        header += [f"{cell} tau", "uncoupled tau", "gain", "speed gain"]
    rows = []
    for task in [*figures.tasks, None]:
        row = [task or "all"]
        for cell, other in pairs:
            on, off = figures.tau(cell, task), figures.tau(other, task)
            gain = on / off - 1 if on is not None and off is not None else None
            ratio = median(figures.ratios(cell, other, task))
            row += [_number(on), _number(off), _percent(gain), _percent(None if ratio is None else ratio - 1)]
        rows.append(row)
    return Table(
        f"Drafting that looks at the noise, against drafting that does not, {_at(figures)}", header, rows
    )


def _detail(figures: Figures) -> Table:
    header = [
        "task, cell",
        "prompts",
        "tau",
        "tokens/s decoding",
        "tokens/s in all",
        "speedup decoding",
        "quartiles",
    ]
    rows = []
    for task in figures.tasks:
        for cell in figures.columns:
            speeds = figures.speeds(cell, task)
            ratios = figures.ratios(cell, PLAIN, task)
            rows.append(
                [
                    f"{task}, {cell}",
                    str(len(figures.speeds(cell, task, "total"))),
                    _number(figures.tau(cell, task)) if cell != PLAIN else NONE,
                    _number(median(speeds), 1),
                    _number(median(figures.speeds(cell, task, "total")), 1),
                    _number(median(ratios)),
                    _range(ratios),
                ]
            )
    return Table(f"Each task and cell, {_at(figures)}", header, rows, detail=True)


def _checks(everything: list[Figures], baselines: list[str]) -> Table:
    """In how many tasks and temperatures each claim holds, and where it holds least."""
    claims: dict[str, list[tuple[float, str]]] = {}

    def note(claim: str, value: float | None, where: str) -> None:
        if value is not None:
            claims.setdefault(claim, []).append((value, where))

    for figures in everything:
        for task in figures.tasks:
            where = f"{task}, {_at(figures)}"
            for cell in figures.columns:
                chain = _chain_of(cell, figures)
                tree, path = figures.tau(cell, task), figures.tau(chain, task) if chain else None
                if re.fullmatch(r"tree:\d+(@.*)?", cell) and not _is_uncoupled(cell) and tree and path:
                    note(f"tau({cell}) >= tau({chain})", tree / path, where)
            for cell in _adaptive(figures):
                fixed = _rivals(cell, figures, baselines)
                others = [PLAIN, _chain_of(cell, figures), figures.best(fixed, PLAIN, task)]
                names = ["off", others[1], "the best fixed cell"]
                for other, name in zip(others, names, strict=True):
                    if other is not None:
                        ratio = median(figures.ratios(cell, other, task))
                        note(f"speed({cell}) >= {_BOUND} of {name}", ratio, where)
    rows = []
    for claim, values in claims.items():
        bound = 1.0 if claim.startswith("tau") else _BOUND
        least, where = min(values)
        held = at_least([value for value, _ in values], bound)
        rows.append([claim, f"{held} of {len(values)}", _number(least, 3), where])
    return Table("Checks", ["claim", "holds in", "least ratio", "there"], rows)


def _adaptive(figures: Figures) -> list[str]:
    """Cells that leave something to decide, apart from those whose coupling is off."""
    return [
        cell for cell in figures.columns if _way(cell) in ("auto", "tree:auto") and not _is_uncoupled(cell)
    ]


def _rivals(cell: str, figures: Figures, baselines: list[str]) -> list[str]:
    """The fixed cells that a cell which decides could have been: of the same drafters, or of any when it has all."""
    leaving_out = [*_adaptive(figures), *baselines]
    fixed = [name for name in figures.columns if name not in leaving_out and not _is_uncoupled(name)]
    suffix = cell[len(_way(cell)) :]
    if _way(cell) == "auto":
        return [name for name in fixed if not suffix or name == PLAIN or name == _way(name) + suffix]
    return [name for name in fixed if name.startswith("tree:") and name == _way(name) + suffix]


def _uncoupled(figures: Figures) -> list[tuple[str, str]]:
    """Cells that are there both with coupling and without."""
    return [
        (base, cell)
        for cell in figures.columns
        if _is_uncoupled(cell) and (base := cell.removesuffix(cells.UNCOUPLED)) in figures.columns
    ]


def _chain_of(cell: str, figures: Figures) -> str | None:
    """The chain of the same drafters, or of all of them."""
    suffix = cell[len(_way(cell)) :]
    return next(
        (name for name in (f"chain{suffix}", "chain") if name in figures.columns and name != cell), None
    )


def _way(cell: str) -> str:
    return cell.removesuffix(cells.UNCOUPLED).partition("@")[0]


def _is_uncoupled(cell: str) -> bool:
    return cell.endswith(cells.UNCOUPLED)


def _at(figures: Figures) -> str:
    return f"T={figures.temperature:g}"


def _number(value: float | None, places: int = 2) -> str:
    return NONE if value is None else f"{value:.{places}f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:+.1%}"


def _range(values: list[float]) -> str:
    found = quartiles(values)
    return NONE if found is None else f"{found[0]:.2f} to {found[1]:.2f}"


def _faster(values: list[float]) -> str:
    middle: Any = median(values)
    return NONE if middle is None else f"{middle:.3f} ({at_least(values)} of {len(values)})"
