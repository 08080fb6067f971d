"""A table as text: aligned for a terminal, or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
