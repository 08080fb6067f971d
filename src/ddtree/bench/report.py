"""The report of a benchmark: statistics of the raw figures, as tables for a terminal and for a Markdown document."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from ddtree.bench.methods import OFF, UNCOUPLED
from ddtree.bench.results import Results
from ddtree.bench.run_stats import RunStats, Span, all_stats, median, quartiles
from ddtree.errors import ConfigError

PARTS = ("draft", "build", "verify", "walk", "commit")
_NO_SLOWER = 0.97  # a ratio from here on counts as no slower: the rest is noise
_NONE = "-"
_END = "<!-- end of figures -->"


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: unique among the tables of a report.
        header: names of the columns; the first one names the rows.
        rows: as wide as the header.
        detail: too long for a terminal.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    detail: bool = False

    def text(self) -> str:
        """Return the table for a terminal: the first column to the left, the others to the right."""
        lines = [self.header, *self.rows]
        first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = [
            "  ".join(
                [line[0].ljust(first), *(cell.rjust(w) for cell, w in zip(line[1:], widths, strict=True))]
            )
            for line in lines
        ]
        return "\n".join([self.title, *map(str.rstrip, body)])

    def markdown(self) -> str:
        """Return the table in Markdown, below its title."""
        rule = ["---"] + ["--:"] * (len(self.header) - 1)
        lines = [[_inline(cell).replace("|", r"\|") for cell in line] for line in (self.header, *self.rows)]
        body = ["| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:])]
        return "\n".join([f"**{self.title}**", "", *body])


def tables(results: Results) -> list[Table]:
    """Return all tables: those of each temperature, then the checks."""
    everything = all_stats(results)
    checks = _checks(everything)
    found = [table for stats in everything for table in _of_temperature(stats)]
    return [*found, checks] if checks.rows else found


def _of_temperature(stats: RunStats) -> Iterator[Table]:
    yield _speedups(stats)
    yield _taus(stats)
    yield _speeds(stats)
    for cell in stats.adaptive():
        yield _against(stats, cell)
    yield _rounds(stats)
    coupled = [cell.removesuffix(UNCOUPLED) for cell in stats.specs if cell.endswith(UNCOUPLED)]
    if stats.temperature > 0 and (both := [cell for cell in coupled if cell in stats.specs]):
        yield _coupling(stats, both)
    yield _detail(stats)


def _speedups(stats: RunStats) -> Table:
    columns = stats.columns[1:]
    rows = [[task, *(_number(stats.ratio(cell, OFF, task)) for cell in columns)] for task in stats.tasks]
    for base, name in ((OFF, "geometric mean"), ("hf", "geometric mean, over hf")):
        if base in stats.columns:
            rows.append([name, *(_number(stats.geometric(cell, base)) for cell in columns)])
    return Table(f"Speedup of decoding over off, {stats.at}", ["task", *columns], rows)


def _taus(stats: RunStats) -> Table:
    columns = [cell for cell in stats.columns if cell != OFF and stats.accepted(cell)]
    every = (*stats.tasks, None)
    rows = [[task or "all", *(_number(stats.tau(cell, task)) for cell in columns)] for task in every]
    return Table(f"Tokens a round (tau), {stats.at}", ["task", *columns], rows)


_SPEEDS = ("tokens/s decoding", "tokens/s in all", "speedup decoding", "quartiles")


def _speeds_of(stats: RunStats, cell: str, task: str | None = None) -> list[str]:
    """Return the figures of the columns `_SPEEDS`."""
    decoding, total = (median(stats.speeds(cell, task, span)) for span in get_args(Span))
    ratios = stats.ratios(cell, OFF, task)
    low, high = map(_number, quartiles(ratios))
    return [_number(decoding, ".1f"), _number(total, ".1f"), _number(median(ratios)),
            f"{low} to {high}" if ratios else _NONE]  # fmt: skip


def _speeds(stats: RunStats) -> Table:
    verdicts = ("equal", "near-tie", "different")
    header = ["cell", *_SPEEDS, "speedup in all", "nodes a round", "noise", *verdicts]
    rows = []
    for cell in stats.columns:
        counts = Counter(run["verdict"]["kind"] for run in stats.runs(cell))
        row = [cell, *_speeds_of(stats, cell), _number(stats.ratio(cell, OFF, span="total"))]
        row += [_number(stats.nodes(cell), ".1f"), _number(stats.noise(cell), ".1%")]
        rows.append([*row, *(str(counts[kind]) for kind in verdicts)])
    return Table(f"Speeds, medians over all prompts, {stats.at}", header, rows)


def _detail(stats: RunStats) -> Table:
    header = ["task, cell", "prompts", "tau", *_SPEEDS]
    rows = []
    for task, cell in product(stats.tasks, stats.columns):
        tau = _NONE if cell == OFF else _number(stats.tau(cell, task))
        prompts = str(len(stats.speeds(cell, task, "total")))
        rows.append([f"{task}, {cell}", prompts, tau, *_speeds_of(stats, cell, task)])
    return Table(f"Each task and cell, {stats.at}", header, rows, detail=True)


def _against(stats: RunStats, cell: str) -> Table:
    chain = stats.chain_of(cell)
    header = ["task", f"{cell} / off", f"{cell} / {chain or 'chain'}", "best fixed", f"{cell} / best fixed"]
    rows = []
    for task in stats.tasks:
        best = stats.best(stats.rivals(cell), task)
        wins = [_wins(stats.ratios(cell, other, task)) if other else _NONE for other in (OFF, chain, best)]
        rows.append([task, *wins[:2], best or _NONE, wins[2]])
    return Table(f"{cell} against fixed choices, {stats.at}", header, rows)


def _rounds(stats: RunStats) -> Table:
    found = {cell: seconds for cell in stats.columns if (seconds := stats.round_seconds(cell))}
    rows = [[cell, *(_number(1e3 * parts.get(part, 0.0)) for part in PARTS)] for cell, parts in found.items()]
    return Table(f"Milliseconds of a round by part, {stats.at}", ["cell", *PARTS], rows)


def _coupling(stats: RunStats, cells: list[str]) -> Table:
    header = ["task"]
    for cell in cells:
        header += [f"{cell} tau", "uncoupled tau", "gain", "speed gain"]
    rows = []
    for task in (*stats.tasks, None):
        row = [task or "all"]
        for cell in cells:
            on, off = stats.tau(cell, task), stats.tau(cell + UNCOUPLED, task)
            gains = on / off - 1, stats.ratio(cell, cell + UNCOUPLED, task) - 1
            row += [_number(on), _number(off), *(_number(gain, "+.1%") for gain in gains)]
        rows.append(row)
    title = f"Drafting that looks at the noise, against drafting that does not, {stats.at}"
    return Table(title, header, rows)


def _checks(everything: Sequence[RunStats]) -> Table:
    """Return in how many tasks and temperatures each claim holds, and where it holds least."""
    claims: dict[tuple[str, float], list[tuple[float, str]]] = defaultdict(list)
    for stats, task in [(each, task) for each in everything for task in each.tasks]:
        for cell, spec in stats.specs.items():
            chain = stats.chain_of(cell)
            if chain and spec.coupled and spec.method == "tree" and not spec.adaptive:
                ratio = stats.tau(cell, task) / stats.tau(chain, task)
                claims[f"tau({cell}) >= tau({chain})", 1.0].append((ratio, f"{task}, {stats.at}"))
        for cell in stats.adaptive():
            chain, best = stats.chain_of(cell), stats.best(stats.rivals(cell), task)
            for other, name in ((OFF, OFF), (chain, chain), (best, "the best fixed cell")):
                if other:
                    claim = f"speed({cell}) >= {_NO_SLOWER} of {name}", _NO_SLOWER
                    claims[claim].append((stats.ratio(cell, other, task), f"{task}, {stats.at}"))
    rows = []
    for (text, bound), found in claims.items():
        if values := [(ratio, where) for ratio, where in found if ratio > 0]:
            least, where = min(values)
            held = sum(ratio >= bound for ratio, _ in values)
            rows.append([text, f"{held} of {len(values)}", _number(least, ".3f"), where])
    return Table("Checks", ["claim", "holds in", "least ratio", "there"], rows)


def _number(value: float, form: str = ".2f") -> str:
    return _NONE if math.isnan(value) else format(value, form)


def _wins(values: list[float]) -> str:
    if not values:
        return _NONE
    return f"{median(values):.3f} ({sum(value >= 1 for value in values)} of {len(values)})"


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
    facts = [f"- {_inline(fact)}" for fact in _facts(results)]
    parts = [_begin(source), "\n".join([*facts, f"- raw figures: [{source}]({source})"])]
    parts += [table.markdown() for table in tables(results)]
    return "\n\n".join([*parts, *map(_inline, _remarks(results)), *pictures, _END])


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


def _inline(text: str) -> str:
    """Return any text as a part of a line of Markdown: without line ends and comments."""
    return " ".join(text.split()).replace("<!--", "&lt;!--")


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
