"""The demo: the same prompts answered one token at a time and with draft trees, compared and timed."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from ddtree.api import Model, Result, load
from ddtree.bench.near_ties import Flip, first_flip
from ddtree.model.target import Target
from ddtree.policy.arms import AutoBudget, AutoMethod

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


PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Give me five short tips for learning a new language.",
    "What is the difference between a list and a tuple in Python?",
)
TITLES = ("one token at a time", "with draft trees")
METHODS: tuple[AutoMethod, AutoMethod] = ("off", "auto")


@dataclass(frozen=True)
class Timed:
    """An answer and the seconds it took, without the time to print it."""

    result: Result
    seconds: float

    @property
    def speed(self) -> float:
        return len(self.result.token_ids) / self.seconds


@dataclass(frozen=True)
class Comparison:
    prompt: str
    plain: Timed
    tree: Timed
    flip: Flip | None

    @property
    def verdict(self) -> str:
        if self.flip is None:
            return "identical"
        return "near-tie" if self.flip.near_tie else "DIFFERENT"


def run_demo(
    *,
    target: str = "demo",
    drafter: str = "auto",
    prompts: tuple[str, ...] = PROMPTS,
    budget: AutoBudget = "auto",
    max_tokens: int = 96,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    out: TextIO | None = None,
) -> int:
    """Answer each prompt both ways, streaming, and print what it took. Returns the exit code.

    The code is 0 where the texts are identical, or part at a near-tie of a low-precision forward pass and are
    identical in float32, which is then checked and said; 1 where they part for any other reason. Raises the
    errors of `load` and `stream`.
    """
    out = out or sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    model = load(target, drafter=drafter, dtype=dtype, device=device)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "budget": budget,
    }
    print(f"{_describe(model, target, drafter)}, budget {budget}, temperature {temperature:g}", file=out)
    if warning := busy():
        print(warning, file=out)
    print("warming up ...", file=out, flush=True)
    for method in METHODS:
        model.generate(_messages(model, prompts[0]), **{**options, "max_tokens": 8, "method": method})
    comparisons = []
    for number, prompt in enumerate(prompts):
        # Which way goes first alternates, so that neither gains from a machine that slows down or speeds up.
        order = (0, 1) if number % 2 == 0 else (1, 0)
        print(f"\n> {prompt}\n", file=out, flush=True)
        timed = _answer_both(model, prompt, order, options, out)
        plain, tree = timed
        flip = _flip(model, plain.result, tree.result, temperature)
        comparisons.append(Comparison(prompt, plain, tree, flip))
        print(f"\n{_line(comparisons[-1])}", file=out, flush=True)
    _report(comparisons, out)
    ties = [one.prompt for one in comparisons if one.flip is not None and one.flip.near_tie]
    settled = not ties or _same_in_float32(
        load(target, drafter=drafter, dtype="float32", device=device), ties, options
    )
    if ties:
        print(
            f"In float32 the texts of these prompts {'are identical' if settled else 'DIFFER'}.",
            file=out,
            flush=True,
        )
    return 0 if settled and all(one.verdict != "DIFFERENT" for one in comparisons) else 1


def _answer_both(
    model: Model, prompt: str, order: tuple[int, int], options: dict[str, Any], out: TextIO
) -> tuple[Timed, Timed]:
    """Stream both answers in this order, 0 the plain one and 1 the tree's; in columns where they fit."""
    size = shutil.get_terminal_size()
    columns = Columns(out, TITLES, size.columns, size.lines) if fits(out) else None
    timed: dict[int, Timed] = {}
    for side in order:
        if columns is None:
            print(f"--- {TITLES[side]} ---", file=out, flush=True)
        stream = model.stream(_messages(model, prompt), method=METHODS[side], **options)
        seconds = 0.0
        while True:
            started = time.perf_counter()
            piece = next(stream, None)
            seconds += time.perf_counter() - started
            if piece is None:
                break
            if columns is None:
                print(piece, end="", file=out, flush=True)
            else:
                columns.add(side, piece)
        if columns is None:
            print(file=out)
        timed[side] = Timed(stream.result, seconds)
    return timed[0], timed[1]


def _flip(model: Model, plain: Result, tree: Result, temperature: float) -> Flip | None:
    if plain.token_ids == tree.token_ids:
        return None
    target = model.engine.target
    assert isinstance(target, Target)  # any other decodes both in the same way
    return first_flip(target, plain.prompt_ids, plain.token_ids, tree.token_ids, temperature, plain.seed)


def _same_in_float32(model: Model, prompts: list[str], options: dict[str, Any]) -> bool:
    def tokens(prompt: str, method: AutoMethod) -> list[int]:
        return model.generate(_messages(model, prompt), method=method, **options).token_ids

    return all(tokens(prompt, METHODS[0]) == tokens(prompt, METHODS[1]) for prompt in prompts)


def _messages(model: Model, prompt: str) -> Any:
    templated = getattr(model.tokenizer, "chat_template", None)
    return [{"role": "user", "content": prompt}] if templated else prompt


def _describe(model: Model, target: str, drafter: str) -> str:
    device, dtype = model.engine.target.device, str(model.engine.target.dtype).removeprefix("torch.")
    where = f"CPU ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)
    return f"target {target}, drafter {drafter}, {dtype} on {where}"


def busy() -> str | None:
    """A warning where other programs already keep this machine's cores busy; None where that is not known."""
    if not hasattr(os, "getloadavg"):
        return None
    load_now, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load_now < cores:
        return None
    return (
        f"this machine is busy (load {load_now:.1f} on {cores} cores): the times will be too long, and uneven"
    )


def _line(one: Comparison) -> str:
    plain, tree = one.plain, one.tree
    return (
        f"{plain.seconds:.2f} s ({plain.speed:.1f} tokens/s) against "
        f"{tree.seconds:.2f} s ({tree.speed:.1f} tokens/s): {tree.speed / plain.speed:.2f}x, "
        f"{tree.result.stats.tau:.2f} tokens per forward pass; texts {one.verdict}"
    )


def _report(comparisons: list[Comparison], out: TextIO) -> None:
    row = "{:<34} {:>8} {:>8} {:>9} {:>8} {:>8} {:>6}  {}"
    heads = ("", "plain", "tok/s", "tree", "tok/s", "speedup", "tau", "texts")
    lines = [row.format(*heads)]
    for one in comparisons:
        name = one.prompt if len(one.prompt) <= 34 else one.prompt[:31] + "..."
        lines.append(_row(row, name, [one.plain], [one.tree], one.verdict))
    plain, tree = [one.plain for one in comparisons], [one.tree for one in comparisons]
    lines.append(_row(row, "all", plain, tree, ""))
    print("\n" + "\n".join(lines) + "\n", file=out)
    same = sum(one.flip is None for one in comparisons)
    tokens = sum(len(one.result.token_ids) for one in plain)
    if same == len(comparisons):
        print(f"All {same} texts are identical, token for token ({tokens} tokens).", file=out)
    for one in comparisons:
        if one.flip is not None:
            print(_explain(one.flip, one.prompt), file=out)
    arms = sum((one.result.stats.arms for one in tree), start=Counter[str]())
    print(
        f"Forward passes by way of drafting: {', '.join(f'{n} {arm}' for arm, n in arms.most_common())}.",
        file=out,
    )
    speedup = _speed(tree) / _speed(plain)
    print(f"Drafting was {speedup:.2f} times as fast as one token at a time.", file=out, flush=True)


def _row(row: str, name: str, plain: list[Timed], tree: list[Timed], verdict: str) -> str:
    rounds = sum(one.result.stats.rounds for one in tree)
    accepted = sum(depth * n for one in tree for depth, n in one.result.stats.accepted.items())
    tau = 1 + accepted / rounds if rounds else 1.0
    speeds = _speed(plain), _speed(tree)
    seconds = [f"{sum(one.seconds for one in way):.2f} s" for way in (plain, tree)]
    return row.format(
        name, seconds[0], f"{speeds[0]:.1f}", seconds[1], f"{speeds[1]:.1f}",
        f"{speeds[1] / speeds[0]:.2f}x", f"{tau:.2f}", verdict,
    ).rstrip()  # fmt: skip


def _speed(timed: list[Timed]) -> float:
    return sum(len(one.result.token_ids) for one in timed) / sum(one.seconds for one in timed)


def _explain(flip: Flip, prompt: str) -> str:
    where = f'The texts for "{prompt}" part at token {flip.index + 1}'
    if flip.near_tie:
        return (
            f"{where}, at a near-tie: the best two scores are {flip.gap:.3g} apart, and the same forward "
            f"in another shape moves them by up to {flip.noise:.3g}. Either text is the model's own."
        )
    return (
        f"{where}, where the scores are {flip.gap:.3g} apart and the forward pass is good to "
        f"{flip.noise:.3g}: that is a defect, please report it."
    )
