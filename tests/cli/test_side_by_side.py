"""The demo's show: both answers streamed, compared and timed; differences told honestly."""

import io
import os
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from ddtree.cli import side_by_side as columns
from ddtree.cli import side_by_side as show
from ddtree.model.target import Target
from ddtree.stats import Stats

PROMPT = [5, 9, 2, 30, 7, 11, 4]
SAME = [3, 8, 21, 13]
ROUNDS = Counter({0: 1, 2: 1})


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


def run(
    monkeypatch: pytest.MonkeyPatch, tree: list[int], out: io.StringIO, model: Any = None
) -> tuple[int, FakeModel]:
    fake = FakeModel(model or tiny.model("llama"), tree)
    monkeypatch.setattr(show, "load", lambda *_, **__: fake)
    return show.run_demo(prompts=("first", "second"), out=out), fake


def test_identical_texts_are_said_to_be_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    code, _ = run(monkeypatch, list(SAME), out)
    text = out.getvalue()
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
    _, fake = run(monkeypatch, list(SAME), io.StringIO())
    assert sorted(fake.warmed) == ["auto", "off"]
    assert fake.streamed == [("first", "off"), ("first", "auto"), ("second", "auto"), ("second", "off")]


def test_a_difference_that_is_no_tie_is_called_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    code, _ = run(monkeypatch, [*SAME[:2], 14, 1], out)
    assert code == 1
    assert "DIFFERENT" in out.getvalue() and "part at token 3" in out.getvalue()
    assert "please report it" in out.getvalue() and "identical, token" not in out.getvalue()


def test_a_near_tie_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.lm_head.weight[14] = model.lm_head.weight[21]
    out = io.StringIO()
    code, fake = run(monkeypatch, [*SAME[:2], 14, 1], out, model)
    assert code == 0
    assert "at a near-tie" in out.getvalue() and "identical, token" not in out.getvalue()
    assert "In float32 the texts of these prompts are identical." in out.getvalue()
    assert fake.checked == ["off", "auto"] * 2


def test_a_near_tie_that_float32_does_not_settle_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.lm_head.weight[14] = model.lm_head.weight[21]
    monkeypatch.setattr(FakeModel, "exact_tree", [*SAME[:3], 1])
    out = io.StringIO()
    code, _ = run(monkeypatch, [*SAME[:2], 14, 1], out, model)
    assert code == 1
    assert "In float32 the texts of these prompts DIFFER." in out.getvalue()


def test_a_wide_terminal_shows_both_answers_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(columns.sys, "platform", "linux")
    monkeypatch.setattr(columns.shutil, "get_terminal_size", lambda *_: os.terminal_size((100, 30)))
    run(monkeypatch, list(SAME), out)
    assert f"w3 w8 w21 w13{' ' * 36}│ w3 w8 w21 w13" in out.getvalue()


@pytest.mark.parametrize(("load", "warned"), [(0.2, False), (7.5, True)])
def test_a_busy_machine_is_said_to_spoil_the_times(
    load: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show.os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(show.os, "cpu_count", lambda: 4)
    out = io.StringIO()
    run(monkeypatch, list(SAME), out)
    assert ("this machine is busy (load 7.5 on 4 cores)" in out.getvalue()) is warned
