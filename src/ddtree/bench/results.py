"""Results of a benchmark: a file of JSON lines that a run appends to and resumes from, and that all tables use.

The first line is the header (machine, versions, date, command, settings). Then comes a line `run` for each prompt,
turn, temperature and method ("cell"). The methods of one prompt, turn and temperature are written together, so that a
run that was broken off resumes there. Other lines hold what was learnt (`latency`, `policy`) or left out (`skipped`).
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers

import ddtree
from ddtree.errors import ConfigError
from ddtree.policy.cache import device_name

FORMAT = 1
RunKey = tuple[str, float, int]
"""Prompt id, temperature, turn."""

# What must be the same for figures to be in one table.
_SAME = ("format", "settings", "machine", "versions")
_BEGINNING = b'{"kind": "header", "format": '

# Fields by type. Everything that tables are made of is checked once, when a file is read.
_NUMBER = (int, float)
_Types = dict[Any, str]
_HEADER: _Types = {str: "date command", dict: "machine versions settings"}
_MACHINE: _Types = {str: "processor system", int: "cores threads"}
_SETTINGS: _Types = {
    str: "target drafter dtype",
    list: "cells baselines temperatures prompts",
    int: "max_tokens turns",
}
_KEY: _Types = {str: "id", _NUMBER: "temperature", int: "turn"}
_RUN: _Types = {
    str: "id task cell",
    int: "turn message messages tokens rounds nodes",
    _NUMBER: "temperature total_s decode_s",
    dict: "accepted_depth seconds verdict",
}
_DIFFERENT: _Types = {int: "at", (*_NUMBER, type(None)): "gap", _NUMBER: "noise"}
_ITEMS: _Types = {str: "cells baselines prompts", _NUMBER: "temperatures seconds", int: "accepted_depth"}
_VERDICTS = ("equal", "near-tie", "different", "unchecked")


@dataclass
class Results:
    """The content of a file: the header, and the lines of each kind."""

    header: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] | None = None
    policies: dict[str, Any] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, from the header."""
        return self.header["settings"]

    @property
    def columns(self) -> list[str]:
        """Return the names of methods and baselines, in the order of the tables."""
        return [*self.settings["cells"], *self.settings["baselines"]]


class ResultsFile:
    """A file that is being written, with the place where a run that was broken off resumes.

    Args:
        path: of a new file, or of one whose header has the same settings, machine and versions.
        header: of this run.

    Attributes:
        done: keys of what needs no measuring any more.

    Raises:
        ConfigError: the file belongs to another run, is no such file, or cannot be read or written.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.done: set[RunKey] = set()
        header = {"kind": "header", "format": FORMAT, **header}
        with _naming_file("read or written", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        try:
            _lock(self._file, path)
            if not self._resume(header):
                self.write([header])
        except BaseException:
            self.__exit__()
            raise

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records, all of them at once. Raises ConfigError, for example when the disk is full."""
        with _naming_file("written", self.path):
            self._file.write("".join(json.dumps(record) + "\n" for record in records))
            self._file.flush()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing tries once more to write what did not fit; that error was raised already.
        with suppress(OSError):
            self._file.close()

    def _resume(self, header: dict[str, Any]) -> bool:
        """Keep the finished part of a run that was broken off; return whether there is any."""
        with _naming_file("read or written", self.path):
            text = self.path.read_bytes() if self.path.is_file() else b""
            lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
            known = None
            if lines or not _BEGINNING.startswith(text[: len(_BEGINNING)]):
                known = parse(b"".join(lines).decode("utf-8"), str(self.path))
            if known is None or not (known.runs or known.skipped):
                if text:
                    self._file.truncate(0)
                return False
            if differing := _differing(known.header, header):
                raise ConfigError(
                    f"{self.path} holds a run with other {', '.join(differing)}: name another file with --out, or "
                    "run with the same ones to go on"
                )
            self.done = _finished(known)
            kept = b"".join(line for line in lines if self._is_finished(line))
            same = len(kept) if text.startswith(kept) else 0
            self._file.truncate(same)
            self._file.write(kept[same:].decode("utf-8"))
            return True

    def _is_finished(self, line: bytes) -> bool:
        record = json.loads(line) if line.strip() else {"kind": None}
        return record["kind"] != "run" or _key(record) in self.done


def read(path: Path) -> Results:
    """Read a file. Raises ConfigError, with the number of a bad line."""
    with _naming_file("read", path):
        text = path.read_text(encoding="utf-8")
    return parse(text, str(path))


def parse(text: str, where: str) -> Results:
    """Parse the text of a file. Raises ConfigError, with the number of a bad line."""
    found: Results | None = None
    seen: set[tuple[Any, ...]] = set()
    # Not `splitlines`: JSON may hold characters that it takes for the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if found is None:
                _check_header(record)
                found = Results(record)
            else:
                _add(record, found, seen)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{where}, line {number} is not of a file of figures ({type(error).__name__}: {error}): name one "
                "that ddtree bench has written"
            ) from error
    if found is None:
        raise ConfigError(f"{where} is empty: name a file that ddtree bench has written")
    return found


def _add(record: dict[str, Any], results: Results, seen: set[tuple[Any, ...]]) -> None:
    """Check a line after the header and add it. Raises ValueError, KeyError or TypeError naming what is wrong."""
    kind = record["kind"]
    if kind == "run":
        _check(record, _RUN)
        for depth in record["accepted_depth"]:
            int(depth)
        verdict = record["verdict"]
        if verdict["kind"] not in _VERDICTS:
            raise ValueError(f"verdict {verdict['kind']!r} is none of {', '.join(_VERDICTS)}")
        if verdict["kind"] == "different":
            _check(verdict, _DIFFERENT)
        key = (*_key(record), record["message"], record["cell"])
        if key in seen:
            raise ValueError(f"{record['cell']} answers {record['id']!r} a second time")
        seen.add(key)
        results.runs.append(record)
    elif kind == "latency":
        results.latency = record
    elif kind == "policy":
        results.policies[record["cell"]] = record["state"]
    elif kind == "skipped":
        _check(record, _KEY)
        results.skipped.append(record)


def _check_header(record: dict[str, Any]) -> None:
    if record["kind"] != "header":
        raise ValueError("the first line is no header")
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']!r} is not {FORMAT}")
    _check(record, _HEADER)
    _check(record["machine"], _MACHINE)
    _check(record["settings"], _SETTINGS)


def _check(record: dict[str, Any], types: _Types) -> None:
    """Raise KeyError or ValueError naming a field that is missing or of another type, or holds an item that is."""
    item_types = {name: kind for kind, names in _ITEMS.items() for name in names.split()}
    for kind, names in types.items():
        for name in names.split():
            value = record[name]
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}")
            if name in item_types:
                for item in value.values() if kind is dict else value:
                    if not isinstance(item, item_types[name]):
                        raise ValueError(f"{name} holds {item!r}")


def _key(record: dict[str, Any]) -> RunKey:
    return record["id"], record["temperature"], record["turn"]


def _finished(results: Results) -> set[RunKey]:
    """Return the keys that were skipped, or for which every method has answered every message."""
    counts = Counter(_key(record) for record in results.runs)
    wanted = {_key(record): len(results.columns) * record["messages"] for record in results.runs}
    measured = {key for key, count in counts.items() if count == wanted[key]}
    return measured | {_key(record) for record in results.skipped}


def _differing(known: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the names of what two headers differ in; settings and versions one by one."""
    wanted = json.loads(json.dumps(wanted))
    found = []
    for part in _SAME:
        one, other = known.get(part), wanted.get(part)
        if isinstance(one, dict) and isinstance(other, dict):
            found += [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
        elif one != other:
            found.append(part)
    return found


def _lock(file: TextIO, path: Path) -> None:
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


@contextmanager
def _naming_file(what: str, path: Path) -> Iterator[None]:
    """Raise ConfigError, with the path and what cannot be done, for the errors of files in a block."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"{path} cannot be {what} ({why[0].lower() + why[1:]}): name another file"
        ) from error


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return processor, cores this process may use, threads, accelerator and system as plain JSON values."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "processor": device_name(torch.device("cpu")),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type != "cpu":
        found["accelerator"] = device_name(device)
    return found


def versions() -> dict[str, str]:
    """Return the versions of ddtree, torch, transformers and Python."""
    return {
        "ddtree": ddtree.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def busy_warning() -> str | None:
    """Return a warning where other programs keep this machine's cores busy; None where it is idle or not known."""
    if sys.platform == "win32":
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores:
        return None
    return f"this machine is busy (load {load:.1f} on {cores} cores): the times will be too long, and uneven"
