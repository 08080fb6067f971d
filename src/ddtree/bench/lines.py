"""What the lines of a file of raw figures must hold for tables to be made of them."""

from __future__ import annotations

from typing import Any

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
