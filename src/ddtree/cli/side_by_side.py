"""`ddtree demo`: the same prompts answered one token at a time and with draft trees, compared and timed."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ddtree.cli import options

if TYPE_CHECKING:
    from ddtree.api import Model, Result
    from ddtree.bench.near_ties import Difference

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Give me five short tips for learning a new language.",
    "What is the difference between a list and a tuple in Python?",
)
TITLES = ("one token at a time", "with draft trees")
METHODS = ("off", "auto")
MIN_WIDTH = 72  # cells of a terminal for two columns
_DIVIDER = " │ "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree demo`."""
    parser.add_argument("prompt", nargs="*", help="prompts (default: three of its own)")
    parser.add_argument("--target", default="demo", metavar="NAME", help="default: demo")
    parser.add_argument("--drafter", default="auto", metavar="NAME", help="default: auto")
    parser.add_argument("--budget", type=options.budget, default="auto", metavar="N",
                        help="default: auto, as many nodes as pay on this machine")  # fmt: skip
    parser.add_argument("-n", "--max-tokens", type=int, default=96, metavar="N", help="default: 96")
    parser.add_argument("-t", "--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--device", help="cuda, mps or cpu")
    parser.add_argument("--dtype", choices=options.DTYPES, default="auto",
                        help="default: the checkpoint's own")  # fmt: skip


@dataclass(frozen=True)
class TimedResult:
    """An answer and the seconds it took, without the time to print it."""

    result: Result
    seconds: float


@dataclass(frozen=True)
class PromptComparison:
    """Both answers to a prompt, and where they differ."""

    prompt: str
    plain: TimedResult
    tree: TimedResult
    difference: Difference | None

    @property
    def verdict(self) -> str:
        """Return "identical", "near-tie" or "DIFFERENT"."""
        if self.difference is None:
            return "identical"
        return "near-tie" if self.difference.near_tie else "DIFFERENT"


def run(args: argparse.Namespace) -> int:
    """Answer each prompt both ways, streaming, and print what it took. Raises the errors of `load` and `stream`.

    Returns:
        0 where the texts are identical, or differ at a near-tie of a low-precision forward pass and are identical in
        float32, which is then checked and said; 1 where they differ for any other reason.
    """
    from ddtree import api
    from ddtree.bench.near_ties import first_difference
    from ddtree.bench.results import busy_warning

    options.quiet_transformers(args.debug)
    options.replace_unencodable_output()
    names: dict[str, Any] = {"drafter": args.drafter, "device": args.device}
    model = api.load(args.target, **names, dtype=args.dtype)
    prompts = tuple(args.prompt) or PROMPTS
    chosen = {name: getattr(args, name) for name in ("max_tokens", "temperature", "seed", "budget")}
    print(f"{_describe(model, args)}, budget {args.budget}, temperature {args.temperature:g}")
    if warning := busy_warning():
        print(warning)
    print("warming up ...", flush=True)
    for method in METHODS:
        model.generate(_messages(model, prompts[0]), **{**chosen, "max_tokens": 8, "method": method})
    comparisons = []
    for number, prompt in enumerate(prompts):
        print(f"\n> {prompt}\n", flush=True)
        # Which one goes first alternates, so that neither gains from a machine that slows down or speeds up.
        plain, tree = _answer_both(model, prompt, (number % 2, 1 - number % 2), chosen)
        one, other = plain.result, tree.result
        outputs = one.prompt_ids, one.token_ids, other.token_ids
        difference = first_difference(model.engine.target, *outputs, args.temperature, one.seed)
        comparisons.append(PromptComparison(prompt, plain, tree, difference))
        line = "{} ({} tokens/s) against {} ({} tokens/s): {}, {} tokens per forward pass; texts {}"
        print("\n" + line.format(*_figures([plain], [tree]), comparisons[-1].verdict), flush=True)
    _report(comparisons)
    ties = [one.prompt for one in comparisons if one.verdict == "near-tie"]
    settled = not ties or _same_texts(api.load(args.target, **names, dtype="float32"), ties, chosen)
    if ties:
        print(
            f"In float32 the texts of these prompts {'are identical' if settled else 'DIFFER'}.", flush=True
        )
    return 0 if settled and all(one.verdict != "DIFFERENT" for one in comparisons) else 1


def _answer_both(
    model: Model, prompt: str, order: tuple[int, int], chosen: dict[str, Any]
) -> tuple[TimedResult, TimedResult]:
    """Stream both answers in this order, 0 the plain one and 1 the tree's; in columns where they fit."""
    size = shutil.get_terminal_size()
    columns = Columns(sys.stdout, TITLES, size.columns, size.lines) if fits(sys.stdout) else None
    timed: dict[int, TimedResult] = {}
    for side in order:
        if columns is None:
            print(f"--- {TITLES[side]} ---", flush=True)
        stream: Any = model.stream(_messages(model, prompt), **{**chosen, "method": METHODS[side]})
        seconds = 0.0
        while True:
            started = time.perf_counter()
            piece = next(stream, None)
            seconds += time.perf_counter() - started
            if piece is None:
                break
            if columns is None:
                print(piece, end="", flush=True)
            else:
                columns.add(side, piece)
        if columns is None:
            print()
        timed[side] = TimedResult(stream.result, seconds)
    return timed[0], timed[1]


def _same_texts(model: Model, prompts: list[str], chosen: dict[str, Any]) -> bool:
    def tokens(prompt: str, method: str) -> list[int]:
        return model.generate(_messages(model, prompt), **{**chosen, "method": method}).token_ids

    return all(tokens(prompt, METHODS[0]) == tokens(prompt, METHODS[1]) for prompt in prompts)


def _messages(model: Model, prompt: str) -> Any:
    templated = getattr(model.tokenizer, "chat_template", None)
    return [{"role": "user", "content": prompt}] if templated else prompt


def _describe(model: Model, args: argparse.Namespace) -> str:
    import torch

    device, dtype = model.engine.target.device, str(model.engine.target.dtype).removeprefix("torch.")
    where = f"CPU ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)
    return f"target {args.target}, drafter {args.drafter}, {dtype} on {where}"


def _report(comparisons: list[PromptComparison]) -> None:
    """Print a table of all prompts, whether the texts are identical, and how much faster drafting was."""
    plain, tree = [one.plain for one in comparisons], [one.tree for one in comparisons]
    row = "{:<34} {:>8} {:>8} {:>9} {:>8} {:>8} {:>6}  {}"
    print("\n" + row.format("", "plain", "tok/s", "tree", "tok/s", "speedup", "tau", "texts"))
    for one in comparisons:
        name = one.prompt if len(one.prompt) <= 34 else one.prompt[:31] + "..."
        print(row.format(name, *_figures([one.plain], [one.tree]), one.verdict))
    print(row.format("all", *_figures(plain, tree), "").rstrip() + "\n")
    differences = [_explain(one.difference, one.prompt) for one in comparisons if one.difference is not None]
    tokens = sum(len(one.result.token_ids) for one in plain)
    same = f"All {len(comparisons)} texts are identical, token for token ({tokens} tokens)."
    print(*(differences or [same]), sep="\n")
    arms = sum((one.result.stats.arms for one in tree), start=Counter[str]())
    print(f"Forward passes by way of drafting: {', '.join(f'{n} {arm}' for arm, n in arms.most_common())}.")
    speedup = _speed(tree) / _speed(plain)
    print(f"Drafting was {speedup:.2f} times as fast as one token at a time.", flush=True)


def _figures(plain: list[TimedResult], tree: list[TimedResult]) -> list[str]:
    """Return seconds and speed of both, the speedup and tau."""
    rounds = sum(one.result.stats.rounds for one in tree)
    accepted = sum(depth * n for one in tree for depth, n in one.result.stats.accepted.items())
    cells = []
    for answers in (plain, tree):
        cells += [f"{sum(one.seconds for one in answers):.2f} s", f"{_speed(answers):.1f}"]
    tau = 1 + accepted / rounds if rounds else 1.0
    return [*cells, f"{_speed(tree) / _speed(plain):.2f}x", f"{tau:.2f}"]


def _speed(timed: list[TimedResult]) -> float:
    return sum(len(one.result.token_ids) for one in timed) / sum(one.seconds for one in timed)


def _explain(difference: Difference, prompt: str) -> str:
    where = f'The texts for "{prompt}" part at token {difference.index + 1}'
    if difference.near_tie:
        return (
            f"{where}, at a near-tie: the best two scores are {difference.gap:.3g} apart, and the same forward "
            f"in another shape moves them by up to {difference.noise:.3g}. Either text is the model's own."
        )
    return (
        f"{where}, where the scores are {difference.gap:.3g} apart and the forward pass is good to "
        f"{difference.noise:.3g}: that is a defect, please report it."
    )


def fits(out: TextIO) -> bool:
    """Return whether a stream is a terminal that is wide enough and understands escape codes."""
    if sys.platform == "win32" or not out.isatty():
        return False
    return shutil.get_terminal_size().columns >= MIN_WIDTH


class Columns:
    """Two growing texts side by side: a block of lines that is drawn again, in place, with every piece of text.

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
    """Return lines of at most `width` cells, broken at spaces where there are any, and at the text's own breaks."""
    # A terminal must not be sent control characters.
    shown = (c for c in text.expandtabs(4) if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs"))
    lines: list[str] = []
    for paragraph in "".join(shown).split("\n"):
        broken: list[str] = []
        for word in paragraph.split(" "):
            if broken and _cells(f"{broken[-1]} {word}") <= width:
                broken[-1] += f" {word}"
            else:
                broken += _pieces(word, width)
        lines += broken
    return lines


def _pieces(word: str, width: int) -> list[str]:
    """Cut a word into pieces of at most `width` cells."""
    pieces = [""]
    for character in word:
        if _cells(pieces[-1] + character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


def _cells(text: str) -> int:
    """Return the cells that a text without control characters takes."""
    return sum(
        0 if unicodedata.category(character) in ("Mn", "Me", "Cf")
        else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )  # fmt: skip


def _pad(line: str, width: int) -> str:
    return line + " " * (width - _cells(line))
