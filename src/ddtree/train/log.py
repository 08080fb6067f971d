"""The log of a fit: one JSON object a line, kept over kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    """Appends to a file. Lines of steps after `step`, which a killed fit has lost, are taken out first."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [line for line in read_log(path) if line["step"] <= step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, **values: float) -> None:
        """Append a line; `step` is among the values."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; none where there is no file, and without one that a kill cut short."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
