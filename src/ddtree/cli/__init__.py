"""The command line: `ddtree generate | chat | serve | inspect | demo | bench | calibrate | train`.

Errors a user can cause are one line on standard error and exit code 2. Commands import what they need only when they
are the one that runs, so that `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import ddtree
from ddtree.errors import DDTreeError

COMMANDS = {
    "generate": ("ddtree.cli.generate", "answer one prompt"),
    "chat": ("ddtree.cli.chat", "talk with a model"),
    "serve": ("ddtree.cli.serve", "an OpenAI-compatible endpoint, with a dashboard"),
    "inspect": ("ddtree.cli.inspect", "what a checkpoint is, whether a pair fits, and why not"),
    "demo": (
        "ddtree.cli.side_by_side",
        "the same prompts answered with and without a draft tree, side by side",
    ),
    "bench": ("ddtree.cli.bench", "measure ways of decoding side by side"),
    "calibrate": ("ddtree.cli.calibrate", "measure what rounds cost on this machine"),
    "train": ("ddtree.train.cli", "make a drafter for a target"),
}
FAILED, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 2 for an error, or 130 and 141 for an interrupt or a broken pipe."""
    arguments, passthrough = _split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser(arguments)
    args = parser.parse_args(arguments)
    args.passthrough = passthrough
    if args.command is None:
        parser.print_help()
        return 0
    if sys.stdout is None:
        return _fail("standard output is closed: leave it open, or send it to a file")
    try:
        code = int(importlib.import_module(COMMANDS[args.command][0]).run(args))
        sys.stdout.flush()
        return code
    except DDTreeError as error:
        if args.debug:
            raise
        return _fail(str(error))
    except KeyboardInterrupt:
        if args.debug:
            raise
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left. What is still buffered must not fail once more when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if args.debug:
            raise
        line = " ".join(str(error).split()) or "no message"
        return _fail(f"{type(error).__name__}: {line} (--debug shows where)")


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line on standard error."""
        self.exit(FAILED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split off what follows `--` after `serve`: options of the engine that it starts."""
    if arguments[:1] != ["serve"] or "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddtree",
        description="The text of a language model, unchanged, in fewer forward passes. "
        "`ddtree COMMAND --help` lists a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"ddtree {ddtree.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name in arguments:
            importlib.import_module(module).add_arguments(command)
    return parser


def _fail(message: str) -> int:
    print(f"ddtree: error: {message}", file=sys.stderr)
    return FAILED
