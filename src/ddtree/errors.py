"""Errors a user can cause, and the checks and wording that they share.

Each message is one line that names the thing and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, TypeGuard


class DDTreeError(Exception):
    """Base of all errors that ddtree raises on purpose."""


class ConfigError(DDTreeError, ValueError):
    """An argument or option has a value that cannot work."""


class CheckpointError(DDTreeError):
    """A checkpoint is missing, damaged, or does not fit its target."""


class UnsupportedModelError(DDTreeError):
    """The model cannot be used in the way that was asked."""


class PromptError(DDTreeError, ValueError):
    """The prompt is empty or does not fit the context."""


class CacheMemoryError(DDTreeError, MemoryError):
    """The key/value cache does not fit into the device's memory."""


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number. True and False are not, though Python counts them as integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number within its bounds, as in `check_whole("budget", 16, 0, 1024)`.

    Raises:
        ConfigError: the value is no whole number, or out of bounds; the message names the argument and the bounds.
    """
    if not is_whole(value):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if least is not None and value < least:
        bound = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise ConfigError(f"{name} must be {bound}, not {value}")
    if most is not None and value > most:
        bound = f"from {least} to {most}" if least is not None else f"at most {most}"
        raise ConfigError(f"{name} must be {bound}, not {value}")
    return int(value)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the exception's type when the message is empty."""
    line = next(iter(str(error).strip().splitlines()), "").strip().rstrip(".:")
    return line or type(error).__name__


def did_you_mean(name: object, known: Sequence[str], also: Sequence[str] = ()) -> str:
    """Return advice for an unknown name: the nearest one of `known` and `also`, or the whole list of `known`."""
    near = get_close_matches(str(name), [*known, *also], 1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
