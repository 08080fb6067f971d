"""The raw figures: a file of JSON lines that a run appends to, can be gone on with, and that all tables are made of.

The first line is the header (machine, versions, date, command, settings). Then comes a line `run` for each prompt,
turn, temperature and cell; the cells of one prompt, turn and temperature are written together, so that a run that was
broken off goes on there. Lines of other kinds say what was learnt (`latency`, `policy`) or left out (`skipped`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ddtree.errors import ConfigError

FORMAT = 1
# What must be the same for figures to stand in one table.
_SAME = ("format", "settings", "machine", "versions")
_BEGINNING = b'{"kind": "header", "format": '
Group = tuple[str, float, int]  # prompt id, temperature, turn


@dataclass
class Raw:
    """A file's content: the header, and the lines of each kind."""

    header: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] | None = None
    policies: dict[str, Any] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        return self.header["settings"]

    @property
    def columns(self) -> list[str]:
        """Cells and baselines, in order."""
        return [*self.settings["cells"], *self.settings["baselines"]]


class Log:
    """A file that is being written, and where a run that was broken off goes on.

    Args:
        path: of a new file, or of one whose header has the same settings, machine and versions.
        header: of this run.

    Attributes:
        done: prompt, temperature and turn of what needs no measuring any more.

    Raises:
        ConfigError: the file belongs to another run, is no such file, or cannot be read or written.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.done: set[Group] = set()
        header = {"kind": "header", "format": FORMAT, **header}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot("read or written", path, error) from error
        try:
            _claim(self._file, path)
            if not self._resume(header):
                self.write([header])
        except BaseException:
            with suppress(OSError):
                self._file.close()
            raise

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records as a whole. Raises ConfigError, when the disk is full for one."""
        text = "".join(json.dumps(record) + "\n" for record in records)
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise _cannot("written", self.path, error) from error

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            # Closing tries once more to write what did not fit; the first error has been told.
            if error is None:
                raise _cannot("written", self.path, failure) from failure

    def _resume(self, header: dict[str, Any]) -> bool:
        """Keep what is whole of a run that was broken off; returns whether there is any."""
        try:
            text = self.path.read_bytes() if self.path.is_file() else b""
            whole = text[: text.rfind(b"\n") + 1]
            if not whole and _BEGINNING.startswith(text[: len(_BEGINNING)]):
                self._cut(0)
                return False
            known = parse(whole.decode("utf-8"), str(self.path))
            if not (known.runs or known.skipped):
                self._cut(0)
                return False
            differing = _differing(known.header, header)
            if differing:
                raise ConfigError(
                    f"{self.path} holds a run with other {', '.join(differing)}: name another file with --out, or "
                    "run with the same ones to go on"
                )
            self.done = complete(known)
            kept = b"".join(line for line in whole.splitlines(keepends=True) if self._keeps(line))
            same = len(kept) if text.startswith(kept) else 0
            self._cut(same)
            self._file.write(kept[same:].decode("utf-8"))
            return True
        except (OSError, UnicodeDecodeError) as error:
            raise _cannot("read or written", self.path, error) from error

    def _cut(self, size: int) -> None:
        if self.path.is_file():
            self._file.truncate(size)

    def _keeps(self, line: bytes) -> bool:
        record = json.loads(line) if line.strip() else {"kind": None}
        return record["kind"] != "run" or group(record) in self.done


def group(record: dict[str, Any]) -> Group:
    return record["id"], record["temperature"], record["turn"]


def complete(raw: Raw) -> set[Group]:
    """The prompts, temperatures and turns of which every cell is there, or that were passed over."""
    found: dict[Group, list[dict[str, Any]]] = {}
    for record in raw.runs:
        found.setdefault(group(record), []).append(record)
    cells = len(raw.columns)
    measured = {key for key, records in found.items() if len(records) == cells * records[0]["messages"]}
    return measured | {group(record) for record in raw.skipped}


def read(path: Path) -> Raw:
    """A file's content. Raises ConfigError, with the number of a bad line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _cannot("read", path, error) from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Raw:
    """The content of a file of figures. Raises ConfigError, with the number of a bad line."""
    raw: Raw | None = None
    seen = set()
    # Texts may hold characters that `splitlines` takes for the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind = record["kind"]
            if raw is None:
                raw = _begun(record)
            elif kind == "run":
                run(record)
                key = (*group(record), record["message"], record["cell"])
                if key in seen:
                    raise ValueError(f"{record['cell']} answers {record['id']!r} a second time")
                seen.add(key)
                raw.runs.append(record)
            elif kind == "latency":
                raw.latency = record
            elif kind == "policy":
                raw.policies[record["cell"]] = record["state"]
            elif kind == "skipped":
                skipped(record)
                raw.skipped.append(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{where}, line {number} is not of a file of figures ({type(error).__name__}: {error}): name one "
                "that ddtree bench has written"
            ) from error
    if raw is None:
        raise ConfigError(f"{where} is empty: name a file that ddtree bench has written")
    return raw


def _begun(record: dict[str, Any]) -> Raw:
    if record["kind"] != "header":
        raise ValueError("the first line is no header")
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']!r} is not {FORMAT}")
    header(record)
    return Raw(record)


def _differing(known: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What two headers differ in, by name; settings and versions one by one."""
    wanted = json.loads(json.dumps(wanted))
    found = []
    for part in _SAME:
        one, other = known.get(part), wanted.get(part)
        if isinstance(one, dict) and isinstance(other, dict):
            found += [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
        elif one != other:
            found.append(part)
    return found


def _claim(file: TextIO, path: Path) -> None:
    """Keep other runs out of a file until it is closed. Raises ConfigError when one is writing it."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is writing {path}: wait for its end, or name another file with --out"
        ) from error
    except OSError:
        return  # a file system without locks


def _cannot(what: str, path: Path, error: Exception) -> ConfigError:
    why = getattr(error, "strerror", None) or "it is not UTF-8 text"
    return ConfigError(f"{path} cannot be {what} ({why[0].lower() + why[1:]}): name another file")


_NUMBER = (int, float)
_GROUP = {"id": str, "temperature": _NUMBER, "turn": int}
_RUN = {
    **_GROUP,
    "task": str,
    "message": int,
    "messages": int,
    "cell": str,
    "tokens": int,
    "total_s": _NUMBER,
    "decode_s": _NUMBER,
    "rounds": int,
    "nodes": int,
    "accepted_depth": dict,
    "seconds": dict,
    "verdict": dict,
}
_DIFFERENT = {"at": int, "gap": (*_NUMBER, type(None)), "noise": _NUMBER}
_HEADER = {"date": str, "command": str, "machine": dict, "versions": dict, "settings": dict}
_MACHINE = {"processor": str, "cores": int, "threads": int, "system": str}
_SETTINGS = {
    "target": str,
    "drafter": str,
    "dtype": str,
    "cells": list,
    "baselines": list,
    "temperatures": list,
    "prompts": list,
    "max_tokens": int,
    "turns": int,
}
_KINDS = ("equal", "near-tie", "different", "unchecked")


def header(record: dict[str, Any]) -> None:
    """Raises KeyError or ValueError naming what is missing or of another type."""
    _holds(record, _HEADER)
    _holds(record["machine"], _MACHINE)
    settings = record["settings"]
    _holds(settings, _SETTINGS)
    for name in ("cells", "baselines", "prompts"):
        _all(name, settings[name], str)
    _all("temperatures", settings["temperatures"], _NUMBER)


def run(record: dict[str, Any]) -> None:
    """Likewise."""
    _holds(record, _RUN)
    _all("seconds", list(record["seconds"].values()), _NUMBER)
    depths = record["accepted_depth"]
    _all("accepted_depth", [*map(int, depths), *depths.values()], int)
    verdict = record["verdict"]
    if verdict["kind"] not in _KINDS:
        raise ValueError(f"verdict {verdict['kind']!r} is none of {', '.join(_KINDS)}")
    if verdict["kind"] == "different":
        _holds(verdict, _DIFFERENT)


def skipped(record: dict[str, Any]) -> None:
    """Likewise."""
    _holds(record, _GROUP)


def _holds(record: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(record[name], kind):
            raise ValueError(f"{name} is {record[name]!r}")


def _all(name: str, values: list[Any], kind: Any) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise ValueError(f"{name} holds {value!r}")
