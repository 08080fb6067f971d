"""Two growing texts in a terminal: what is on the screen after the escape codes have run."""

import io
import os
import re

import pytest

from ddtree.cli import side_by_side as columns
from ddtree.cli.side_by_side import Columns, fits, wrap


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What a terminal shows; fails on any control code but those that the block may use."""
        shown: list[str] = []
        row = 0
        for up, erase, text, newline in re.findall(
            r"\x1b\[(\d+)F|(\x1b\[2K)|([^\x1b\n]+)|(\n)", self.getvalue()
        ):
            if up:
                row -= int(up)
                assert row >= 0
            while len(shown) <= row:
                shown.append("")
            if erase:
                shown[row] = ""
            shown[row] += text
            row += bool(newline)
        return shown


def test_both_texts_end_up_side_by_side() -> None:
    screen = Screen()
    block = Columns(screen, ("left", "right"), width=23, height=40)
    for piece in ("one ", "two ", "three ", "four"):
        block.add(0, piece)
    for piece in ("ein ", "zwei ", "drei"):
        block.add(1, piece)
    assert screen.lines() == [
        "left       │ right",
        "───────────┼───────────",
        "one two    │ ein zwei",
        "three four │ drei",
    ]


def test_a_text_taller_than_the_terminal_shows_its_end_and_keeps_its_place() -> None:
    screen = Screen()
    block = Columns(screen, ("left", "right"), width=23, height=9)
    for number in range(20):
        block.add(0, f"{number}\n")
    block.add(1, "x")
    assert [line[:2].strip() for line in screen.lines()[2:]] == ["18", "19", ""]
    assert len(screen.lines()) == 5


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("abc def", ["abc", "def"]),
        ("abcdefgh", ["abcde", "fgh"]),
        ("ab cdefg", ["ab", "cdefg"]),
        ("abcde fg", ["abcde", "fg"]),
        ("a\n\nb", ["a", "", "b"]),
        ("日本語", ["日本", "語"]),
        ("e\u0301e\u0301e\u0301e\u0301e\u0301", ["e\u0301e\u0301e\u0301e\u0301e\u0301"]),
        ("a\x1b[2Jb", ["a[2Jb"]),
        ("\tx", ["x"]),
    ],
)
def test_lines_fit_and_break_at_spaces(text: str, lines: list[str]) -> None:
    assert [line.strip() for line in wrap(text, 5)] == lines
    assert all(sum(max(0, columns._cells(c)) for c in line) <= 5 for line in wrap(text, 5))


def test_only_wide_terminals_get_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns.sys, "platform", "linux")
    for width, wanted in ((columns.MIN_WIDTH, True), (columns.MIN_WIDTH - 1, False)):
        monkeypatch.setattr(columns.shutil, "get_terminal_size", lambda w=width: os.terminal_size((w, 24)))
        assert fits(Screen()) is wanted
        assert not fits(io.StringIO())
