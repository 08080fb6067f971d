"""`ddtree generate`: one prompt, its answer on standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree.cli import options
from ddtree.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from ddtree.api import Model, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ddtree generate`."""
    parser.add_argument("prompt", nargs="?", help="text; without it, --file or standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--json", action="store_true", help="print text, tokens and figures as JSON")
    parser.add_argument("--logprobs", type=int, metavar="K",
                        help="with --json: log-probabilities of each token and of the K likeliest")  # fmt: skip
    parser.add_argument("--stats", action="store_true", help="print figures on standard error")
    options.add_prompt_options(parser)
    options.add_model_options(parser)
    options.add_drafting_options(parser)
    options.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt; return 0. Raises the errors of `load` and `generate`."""
    if args.logprobs is not None and not args.json:
        raise ConfigError("--logprobs is shown with --json only: add it, or leave --logprobs out")
    text = read_prompt(args)
    if not text:
        raise PromptError("the prompt is empty: give at least one character")
    options.replace_unencodable_output()
    with options.load_model(args) as model:
        result = _answer(model, text, args)
    if args.stats:
        print(options.stats_line(result.stats), file=sys.stderr)
    return 0


def _answer(model: Model, text: str, args: argparse.Namespace) -> Result:
    """Write the answer to standard output."""
    chosen = options.generation_options(args)
    prompt: str | list[dict[str, str]] = text
    if options.is_chat(args, model):
        system = [{"role": "system", "content": args.system}] if args.system else []
        prompt = [*system, {"role": "user", "content": text}]
    if args.json:
        result = model.generate(prompt, **chosen)
        print(options.json_line(result.as_dict()))
        return result
    with model.stream(prompt, **chosen) as stream:
        for piece in stream:
            print(piece, end="", flush=True)
    print()
    return stream.result


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt from the argument, the file, or standard input, without its last line break.

    Raises:
        PromptError: there is none, or more than one, or it cannot be read.
    """
    if args.prompt is not None and args.file is not None:
        raise PromptError("the prompt is given twice: as an argument and with --file")
    if args.prompt is not None and args.prompt != "-":
        return str(args.prompt)
    try:
        if args.file is not None and str(args.file) != "-":
            text = args.file.read_text(encoding="utf-8-sig")
        elif sys.stdin is None or (args.prompt is None and args.file is None and sys.stdin.isatty()):
            raise PromptError("there is no prompt: give it as an argument, with --file, or on standard input")
        else:
            text = sys.stdin.read().removeprefix("\ufeff")
    except OSError as error:
        raise PromptError(f"{args.file} cannot be read ({error.strerror}): name a text file") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{args.file or 'standard input'} is not UTF-8 text") from error
    return text.removesuffix("\n")
