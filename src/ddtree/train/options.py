"""Command-line options made from dataclasses: one field is one option, with its default, type and help text."""

from __future__ import annotations

import argparse
import types
from dataclasses import field, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")


def option(value: Any, help: str, /, **keywords: Any) -> Any:
    """Return a dataclass field that is a command-line option too, as in `steps: int = option(2000, "optimizer steps")`.

    Args:
        value: the field's default, and the option's where `keywords` give no other. A list is copied.
        help: what the option's help says; argparse's `%(default)s` may stand in it.
        keywords: further arguments of `argparse.ArgumentParser.add_argument`.
    """
    metadata = {"option": {"help": help, **keywords}}
    if isinstance(value, list):
        return field(default_factory=lambda: list(value), metadata=metadata)
    return field(default=value, metadata=metadata)


def add_options(group: argparse._ActionsContainer, kind: type) -> None:
    """Add an option to a parser or group for each field of the dataclass `kind` that `option` made.

    The field `learning_rate: float` becomes `--learning-rate FLOAT`; a `list` takes one value or more, and `X | None`
    is read as X.
    """
    hints, defaults = get_type_hints(kind), kind()
    for each in fields(kind):
        if "option" not in each.metadata:
            continue
        hint, keywords = (
            hints[each.name],
            {"default": getattr(defaults, each.name), **each.metadata["option"]},
        )
        if isinstance(hint, types.UnionType):
            [hint] = (part for part in get_args(hint) if part is not types.NoneType)
        if get_origin(hint) is list:
            [hint] = get_args(hint)
            keywords["nargs"] = "+"
        group.add_argument("--" + each.name.replace("_", "-"), type=hint, **keywords)


def from_arguments(kind: type[Settings], args: argparse.Namespace, **changes: Any) -> Settings:
    """Return the dataclass `kind` filled from parsed arguments of its fields' names, and from `changes` before them."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names if hasattr(args, name)} | changes)
