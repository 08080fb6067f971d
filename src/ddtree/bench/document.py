"""A report: for a terminal, and as a part of a Markdown document that can be made anew."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ddtree.bench.raw import Raw
from ddtree.bench.table import plain
from ddtree.bench.tables import tables
from ddtree.errors import ConfigError

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
