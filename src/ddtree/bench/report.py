"""The tables of a report."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddtree.bench import methods as cells
from ddtree.bench.results import Raw
from ddtree.errors import ConfigError

Span = Literal["decode", "total"]
Record = dict[str, Any]
PromptKey = tuple[str, int]  # id, message


class Figures:
    """The runs of one temperature.

    Attributes:
        temperature: of all runs here.
        tasks: in the order they came.
        columns: cells and baselines.
    """

    def __init__(self, raw: Raw, temperature: float) -> None:
        self.temperature = temperature
        self.columns = raw.columns
        runs = [run for run in raw.runs if run["temperature"] == temperature]
        self.tasks: list[str] = list(dict.fromkeys(run["task"] for run in runs))
        self._runs: dict[str, dict[PromptKey, list[Record]]] = defaultdict(lambda: defaultdict(list))
        for run in sorted(runs, key=lambda run: run["turn"]):
            self._runs[run["cell"]][run["id"], run["message"]].append(run)

    def runs(self, cell: str, task: str | None = None) -> list[Record]:
        """Of a task, or of all; each prompt's turns together."""
        return [
            run for turns in self._runs[cell].values() for run in turns if task is None or run["task"] == task
        ]

    def speeds(self, cell: str, task: str | None = None, span: Span = "decode") -> list[float]:
        """Tokens per second of each prompt, medians over its turns."""
        return [
            statistics.median(known)
            for turns in self._of(cell, task)
            if (known := [value for run in turns if (value := speed(run, span)) is not None])
        ]

    def ratios(self, cell: str, base: str, task: str | None = None, span: Span = "decode") -> list[float]:
        """How many times as fast as another cell: of each prompt, the median over its turns."""
        found = []
        for key, turns in self._runs[cell].items():
            if task is not None and turns[0]["task"] != task:
                continue
            others = {run["turn"]: speed(run, span) for run in self._runs[base].get(key, [])}
            pairs = [(speed(run, span), others.get(run["turn"])) for run in turns]
            within = [one / other for one, other in pairs if one is not None and other is not None]
            if within:
                found.append(statistics.median(within))
        return found

    def tau(self, cell: str, task: str | None = None) -> float | None:
        """Tokens a round, of all rounds of all prompts; None where none were counted."""
        depths = self.accepted(cell, task)
        rounds = depths.total()
        return 1 + sum(depth * count for depth, count in depths.items()) / rounds if rounds else None

    def accepted(self, cell: str, task: str | None = None) -> Counter[int]:
        """How often so many drafted tokens were accepted in a round."""
        found: Counter[int] = Counter()
        for run in self.runs(cell, task):
            found.update({int(depth): count for depth, count in run.get("accepted_depth", {}).items()})
        return found

    def round_seconds(self, cell: str) -> dict[str, float]:
        """Seconds of the parts of a round: of each prompt its mean, of the prompts their median."""
        by_part: dict[str, list[float]] = defaultdict(list)
        for run in self.runs(cell):
            for part, seconds in run.get("seconds", {}).items():
                if part != "prefill" and run["rounds"]:
                    by_part[part].append(seconds / run["rounds"])
        return {part: statistics.median(values) for part, values in by_part.items()}

    def nodes(self, cell: str) -> float | None:
        """Drafted nodes a round."""
        rounds = sum(run.get("rounds", 0) for run in self.runs(cell))
        return sum(run.get("nodes", 0) for run in self.runs(cell)) / rounds if rounds else None

    def verdicts(self, cell: str) -> Counter[str]:
        return Counter(run["verdict"]["kind"] for run in self.runs(cell))

    def noise(self, cell: str) -> float | None:
        """Relative standard deviation of a prompt's speed from turn to turn, median; None with a single turn."""
        found = []
        for turns in self._runs[cell].values():
            known = [value for run in turns if (value := speed(run, "decode")) is not None]
            if len(known) > 1:
                found.append(statistics.stdev(known) / statistics.mean(known))
        return statistics.median(found) if found else None

    def geometric(self, cell: str, base: str, span: Span = "decode") -> float | None:
        """Geometric mean over tasks of the median ratio."""
        medians = [median(self.ratios(cell, base, task, span)) for task in self.tasks]
        known = [value for value in medians if value is not None]
        return math.exp(statistics.mean(map(math.log, known))) if known else None

    def best(self, cells: Iterable[str], base: str, task: str) -> str | None:
        """The cell that was fastest, by the median of its ratios to `base`."""
        found = {
            cell: value for cell in cells if (value := median(self.ratios(cell, base, task))) is not None
        }
        return max(found, key=lambda cell: found[cell]) if found else None

    def _of(self, cell: str, task: str | None) -> list[list[Record]]:
        return [turns for turns in self._runs[cell].values() if task is None or turns[0]["task"] == task]


def speed(run: Record, span: Span) -> float | None:
    """Tokens per second of one run: of decoding, which begins after the first token, or with the prompt's time."""
    if span == "total":
        return run["tokens"] / run["total_s"] if run["total_s"] > 0 else None
    tokens = run["tokens"] - 1
    return tokens / run["decode_s"] if tokens > 0 and run["decode_s"] > 0 else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def at_least(values: Sequence[float], bound: float = 1.0) -> int:
    """How many are as large."""
    return sum(value >= bound for value in values)


@dataclass(frozen=True)
class Table:
    """Cells of text.

    Attributes:
        title: what it shows; unique among the tables of a report.
        header: names of the columns; the first names the rows.
        rows: as wide as the header.
        detail: too long for a terminal.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    detail: bool = False

    def text(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        body = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
        return "\n".join([self.title, *body])

    def markdown(self) -> str:
        rule = ["---"] + ["--:"] * (len(self.header) - 1)
        lines = [
            [plain(cell).replace("|", r"\|") for cell in line] for line in (self.header, rule, *self.rows)
        ]
        body = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([f"**{self.title}**", "", *body])


def plain(text: str) -> str:
    """A text that may hold anything as a part of a line of Markdown: without line ends and comments."""
    return " ".join(text.split()).replace("<!--", "&lt;!--")


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        line[0].ljust(widths[0]),
        *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
    ]


PLAIN = cells.OFF_CELL
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


_END = "<!-- end of figures -->"


def terminal(raw: Raw) -> str:
    """The tables that fit a terminal, and what they were measured on."""
    shown = [table.text() for table in tables(raw) if not table.detail]
    return "\n\n".join([*_facts(raw), *shown, *_remarks(raw)])


def markdown(raw: Raw, source: str, plots: list[str]) -> str:
    """A part of a document between two comments; the first one names the file of raw figures.

    Args:
        source: the file, as seen from the document's folder.
        plots: pictures, likewise.
    """
    pictures = [f"![{Path(plot).stem.replace('-', ' ')}]({plot})" for plot in plots]
    facts = [f"- {plain(fact)}" for fact in _facts(raw)]
    parts = [
        _begin(source),
        "\n".join([*facts, f"- raw figures: [{source}]({source})"]),
        *(table.markdown() for table in tables(raw)),
        *map(plain, _remarks(raw)),
        *pictures,
        _END,
    ]
    return "\n\n".join(parts)


def write(path: Path, raw_path: Path, raw: Raw, plots: list[Path]) -> None:
    """Put the part for a file of raw figures into a document: in place of the one before, or at its end.

    What stands outside of such parts is left as it is. Raises ConfigError when the document cannot be written.
    """
    folder = path.parent
    source = _seen_from(folder, raw_path)
    part = markdown(raw, source, [_seen_from(folder, plot) for plot in plots])
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
        after, found = re.subn(
            re.escape(_begin(source)) + ".*?" + re.escape(_END), lambda _: part, before, flags=re.DOTALL
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(after if found else f"{before.rstrip()}\n\n{part}\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be written ({why}): name another file with --markdown") from error


def _begin(source: str) -> str:
    return f"<!-- figures of {source} -->"


def _seen_from(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _facts(raw: Raw) -> list[str]:
    header, settings, machine = raw.header, raw.settings, raw.header["machine"]
    accelerator = f"{machine['accelerator']}, " if machine.get("accelerator") else ""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    prompts = len({run["id"] for run in raw.runs})
    return [
        f"target {settings['target']}, drafter {settings['drafter']}, {settings['dtype']}; {header['date']}",
        f"{accelerator}{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['system']}; {versions}",
        f"{prompts} prompts of {' and '.join(settings['prompts'])}, at most {settings['max_tokens']} tokens, "
        f"{_times(settings['turns'])}; command: `{header['command']}`",
    ]


def _remarks(raw: Raw) -> list[str]:
    lines = [
        'Decoding begins after the first token; "in all" includes the prompt. Ratios are medians over prompts of '
        "ratios within a turn. Quartiles are over prompts, noise over turns. tau pools all rounds."
    ]
    if raw.skipped:
        names = ", ".join(dict.fromkeys(record["id"] for record in raw.skipped))
        lines.append(f"Passed over, too long for the context: {names}.")
    different: list[dict[str, Any]] = [run for run in raw.runs if run["verdict"]["kind"] == "different"]
    for run in different:
        verdict = run["verdict"]
        lines.append(
            f"Different from off: {run['cell']}, {run['id']}, T={run['temperature']:g}, at token {verdict['at']} "
            f"(gap {verdict['gap']}, noise {verdict['noise']})."
        )
    return lines


def _times(turns: int) -> str:
    return "measured once" if turns == 1 else f"measured {turns} times"


_PLOT_PARTS = ("draft", "build", "verify", "walk", "commit")


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
        found.append((f"round-{slug}", f"Time of a round, {at}", _plot_rounds(figures)))
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
    return (
        median(figures.ratios(cell, cells.OFF_CELL, task))
        if task
        else figures.geometric(cell, cells.OFF_CELL)
    )


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


def _plot_rounds(figures: Figures) -> Picture:
    def picture(axes: Any) -> None:
        shown = [cell for cell in figures.columns if figures.round_seconds(cell)]
        left = [0.0] * len(shown)
        for part in _PLOT_PARTS:
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
