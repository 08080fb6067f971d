"""Two texts side by side in a terminal, each growing as it arrives."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from typing import TextIO

MIN_WIDTH = 72
_DIVIDER = " │ "


def fits(out: TextIO) -> bool:
    """Whether `out` is a terminal that is wide enough and moves its cursor when told to."""
    if sys.platform == "win32" or not out.isatty():
        return False
    return shutil.get_terminal_size().columns >= MIN_WIDTH


class Columns:
    """A block of lines that is drawn again, in place, with every piece of text.

    Args:
        out: a terminal.
        titles: of the left and the right column.
        width, height: of the terminal, in cells. A text longer than the height shows its end.
    """

    def __init__(self, out: TextIO, titles: tuple[str, str], width: int, height: int) -> None:
        self._out = out
        self._width = (width - len(_DIVIDER)) // 2
        self._height = max(1, height - 6)
        self._texts = ["", ""]
        self._drawn = 0
        rule = "─" * self._width
        self._out.write(f"{_pad(titles[0], self._width)}{_DIVIDER}{titles[1]}\n{rule}─┼─{rule}\n")

    def add(self, side: int, piece: str) -> None:
        """Append to the left (0) or the right (1) text."""
        self._texts[side] += piece
        columns = [wrap(text, self._width)[-self._height :] for text in self._texts]
        count = max(len(columns[0]), len(columns[1]), self._drawn)
        left, right = ([*lines, *[""] * (count - len(lines))] for lines in columns)
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        body = "".join(
            f"\x1b[2K{_pad(a, self._width)}{_DIVIDER}{b}\n" for a, b in zip(left, right, strict=True)
        )
        self._out.write(up + body)
        self._out.flush()
        self._drawn = count


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken at spaces where there are any, and at the text's own breaks."""
    return [
        line for paragraph in text.expandtabs(4).split("\n") for line in _wrap_paragraph(paragraph, width)
    ]


def _wrap_paragraph(text: str, width: int) -> list[str]:
    lines, line, used, space = [], "", 0, -1
    for character in text:
        cells = _cells(character)
        if cells < 0:
            continue
        if used + cells > width:
            if character == " ":
                lines.append(line)
                line, used, space = "", 0, -1
                continue
            kept = line[:space] if space > 0 else line
            line = line[len(kept) :].removeprefix(" ")
            lines.append(kept)
            used, space = sum(map(_cells, line)), -1
        if character == " ":
            space = len(line)
        line += character
        used += cells
    return [*lines, line]


def _cells(character: str) -> int:
    """Cells that a character takes; -1 for those that a terminal must not be sent."""
    category = unicodedata.category(character)
    if category in ("Cc", "Cs"):
        return -1
    if category in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _pad(line: str, width: int) -> str:
    return line + " " * (width - sum(map(_cells, line)))
