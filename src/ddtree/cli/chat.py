"""`ddtree chat`: a conversation. Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D leaves."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddtree.cli import options
from ddtree.errors import PromptError

if TYPE_CHECKING:
    from ddtree.api import Model

_HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree chat`."""
    parser.add_argument("--stats", action="store_true", help="print figures after each answer")
    options.add_prompt_options(parser)
    options.add_model_options(parser)
    options.add_drafting_options(parser)
    options.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves; return 0. Raises the errors of `load` and `stream`."""
    options.replace_unencodable_output()
    with options.load_model(args) as model:
        return _talk(model, args)


def _talk(model: Model, args: argparse.Namespace) -> int:
    chosen = options.generation_options(args)
    templated = options.is_chat(args, model)
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history in `input`)
        drafter = model.engine.drafter
        print(f"{args.target}, {drafter.name if drafter else 'no drafter'}. {_HELP}.")
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    history = list(beginning)
    for line in _lines(interactive):
        text = line.strip()
        if not text:
            continue
        if text in ("/exit", "/quit"):
            break
        if text == "/reset":
            history = list(beginning)
            print("(forgotten)", flush=True)
            continue
        if text in ("/help", "/?"):
            print(_HELP, flush=True)
            continue
        messages = [*history, {"role": "user", "content": text}]
        # A model without a template reads the texts, one per line.
        plain = "".join(message["content"] + "\n" for message in messages)
        try:
            result = _answer(model, messages if templated else plain, chosen)
        except PromptError as error:
            print(f"ddtree: {error} (/reset begins anew)", file=sys.stderr)
            continue
        history = [*messages, {"role": "assistant", "content": result.text}]
        if args.stats:
            print(options.stats_line(result.stats), file=sys.stderr)
    return 0


def _answer(model: Any, prompt: Any, chosen: dict[str, Any]) -> Any:
    """Print an answer as it comes; Ctrl-C ends it, and what there is of it counts."""
    with _interruption() as interrupted, model.stream(prompt, **chosen) as stream:
        for piece in stream:
            print(piece, end="", flush=True)
            if interrupted:
                break
    print(" (stopped)" if interrupted else "", flush=True)
    return stream.result


def _lines(interactive: bool) -> Iterator[str]:
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(/exit leaves)")


@contextmanager
def _interruption() -> Iterator[list[int]]:
    """Let the first Ctrl-C fill the list, so that no round breaks off half done; a second one interrupts."""
    pressed: list[int] = []

    def press(number: int, _frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
