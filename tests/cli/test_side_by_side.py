"""`ddtree demo`: both answers streamed, compared and timed; and two growing texts side by side in a terminal."""

import io
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from ddtree.cli import main, side_by_side
from ddtree.cli.side_by_side import Columns, fits, wrap
from ddtree.model.target import Target
from ddtree.stats import Stats

PROMPT = [5, 9, 2, 30, 7, 11, 4]
SAME = [3, 8, 21, 13]
ROUNDS = Counter({0: 1, 2: 1})


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


class Streamed:
    def __init__(self, tokens: list[int], stats: Stats) -> None:
        self.result = SimpleNamespace(token_ids=tokens, stats=stats, prompt_ids=PROMPT, seed=0)
        self._pieces = iter([f"w{token} " for token in tokens])

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)


class FakeModel:
    """Answers with given tokens for each method; counts what it was asked."""

    tokenizer = SimpleNamespace(chat_template="x")
    exact_tree = SAME

    def __init__(self, model: Any, tree: list[int]) -> None:
        self.target = Target(model)
        self.engine = SimpleNamespace(target=self.target)
        self.answers = {"off": SAME, "auto": tree}
        self.streamed: list[tuple[str, str]] = []
        self.warmed: list[str] = []
        self.checked: list[str] = []
        self.exact = {"off": SAME, "auto": self.exact_tree}

    def generate(self, messages: Any, *, method: str, **_: Any) -> SimpleNamespace:
        (self.warmed if not self.streamed else self.checked).append(method)
        return SimpleNamespace(token_ids=self.exact[method])

    def stream(self, messages: Any, *, method: str, **_: Any) -> Streamed:
        self.streamed.append((messages[0]["content"], method))
        tokens = self.answers[method]
        accepted = ROUNDS if method == "auto" else Counter({0: len(tokens) - 1})
        arms = Counter({"tree@dflash" if method == "auto" else "off": accepted.total()})
        return Streamed(tokens, Stats(method=method, rounds=accepted.total(), arms=arms, accepted=accepted))


def run(monkeypatch: pytest.MonkeyPatch, tree: list[int], model: Any = None) -> tuple[int, str, FakeModel]:
    """Run the demo on two prompts; give exit code, output and the model."""
    fake, out = FakeModel(model or tiny.model("llama"), tree), sys.stdout
    if not isinstance(out, Screen):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("ddtree.api.load", lambda *_, **__: fake)
    return main(["demo", "first", "second"]), out.getvalue(), fake


def test_identical_texts_are_said_to_be_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run(monkeypatch, list(SAME))
    assert code == 0
    assert "All 2 texts are identical, token for token (8 tokens)." in text
    assert "Forward passes by way of drafting: 4 tree@dflash." in text
    assert "times as fast" in text
    table = [line for line in text.splitlines() if line.startswith(("first ", "second ", "all "))]
    assert [line.split()[-1] for line in table[:2]] == ["identical", "identical"]
    assert all(" 2.00 " in f"{line} " for line in table)  # tau: two rounds, two accepted nodes
    assert text.count("w3 w8 w21 w13") == 4
    assert "\x1b" not in text


def test_both_ways_are_warmed_up_and_take_turns_in_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, fake = run(monkeypatch, list(SAME))
    assert sorted(fake.warmed) == ["auto", "off"]
    assert fake.streamed == [("first", "off"), ("first", "auto"), ("second", "auto"), ("second", "off")]


def test_a_difference_that_is_no_tie_is_called_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run(monkeypatch, [*SAME[:2], 14, 1])
    assert code == 1
    assert "DIFFERENT" in text and "part at token 3" in text
    assert "please report it" in text and "identical, token" not in text


def test_a_near_tie_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.lm_head.weight[14] = model.lm_head.weight[21]
    code, text, fake = run(monkeypatch, [*SAME[:2], 14, 1], model)
    assert code == 0
    assert "at a near-tie" in text and "identical, token" not in text
    assert "In float32 the texts of these prompts are identical." in text
    assert fake.checked == ["off", "auto"] * 2


def test_a_near_tie_that_float32_does_not_settle_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.lm_head.weight[14] = model.lm_head.weight[21]
    monkeypatch.setattr(FakeModel, "exact_tree", [*SAME[:3], 1])
    code, text, _ = run(monkeypatch, [*SAME[:2], 14, 1], model)
    assert code == 1
    assert "In float32 the texts of these prompts DIFFER." in text


def test_a_wide_terminal_shows_both_answers_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(side_by_side.shutil, "get_terminal_size", lambda *_: os.terminal_size((100, 30)))
    _, text, _ = run(monkeypatch, list(SAME))
    assert f"w3 w8 w21 w13{' ' * 36}│ w3 w8 w21 w13" in text


@pytest.mark.parametrize(("load", "warned"), [(0.2, False), (7.5, True)])
def test_a_busy_machine_is_said_to_spoil_the_times(
    load: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    _, text, _ = run(monkeypatch, list(SAME))
    assert ("this machine is busy (load 7.5 on 4 cores)" in text) is warned


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
    assert all(sum(max(0, side_by_side._cells(c)) for c in line) <= 5 for line in wrap(text, 5))


def test_only_wide_terminals_get_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side.sys, "platform", "linux")
    for width, wanted in ((side_by_side.MIN_WIDTH, True), (side_by_side.MIN_WIDTH - 1, False)):
        monkeypatch.setattr(
            side_by_side.shutil, "get_terminal_size", lambda w=width: os.terminal_size((w, 24))
        )
        assert fits(Screen()) is wanted
        assert not fits(io.StringIO())
