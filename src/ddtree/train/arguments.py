"""Settings of a training run, and the command-line options made from such dataclasses."""

from __future__ import annotations

import argparse
import math
import time
import types
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ddtree.errors import ConfigError
from ddtree.train.loss import LOSSES, Objective

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


_WARMUP = 0.04


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. Each field's help describes it.

    Raises:
        ConfigError: a setting is out of range.
    """

    steps: int = option(2000, "optimizer steps (default: %(default)s)")
    minutes: float | None = option(None, "length of the fit by the clock, in place of a number of steps")
    conversations: int = option(2, "of a pass (default: 2 on a CPU, 64 on other devices)", default=None)
    accumulate: int = option(1, "passes of a step (default: %(default)s)")
    anchors: int = option(64, "per conversation (default: %(default)s)")
    learning_rate: float = option(1e-3, "default: %(default)s")
    weight_decay: float = option(0.05, "default: %(default)s")
    loss: str = option("ce", "what is minimized (default: %(default)s)", choices=LOSSES)
    gamma: float = option(3.0, "decay of the slots' weights (default: %(default)s)")
    soft: float = option(0.5, "share of the target's distribution in the labels (default: %(default)s)")
    prefix_share: float = option(
        0.0,
        "share of the blocks that begin with known tokens, for D2SD's second pass (default: %(default)s)",
    )
    prefix_decay: float = option(
        0.8, "ratio of the chances of successive prefix lengths (default: %(default)s)"
    )
    ema: float = option(0.0, "decay of the weights' average; 0 for none (default)")
    evaluate_every: int = option(
        200, "steps between evaluations on held-out answers, each a checkpoint (default: %(default)s)"
    )
    look_at: int = option(256, "conversations of an evaluation (default: %(default)s)")
    patience: int = option(3, "evaluations without gain; 0 never stops (default: 3)")
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "conversations", "accumulate", "anchors", "evaluate_every", "look_at"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate={self.learning_rate} must be positive")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes} must be positive")
        if not (0 <= self.prefix_share <= 1 and self.prefix_decay > 0 and 0 <= self.ema < 1):
            raise ConfigError(
                "prefix_share must be within 0..1, prefix_decay positive, and ema at least 0 and below 1"
            )
        _ = self.objective

    @property
    def objective(self) -> Objective:
        """The loss with its settings."""
        return Objective(self.loss, self.gamma, self.soft)


class Schedule:
    """Learning rate and end of a run, by steps, or by time when the config has minutes."""

    def __init__(self, config: TrainConfig) -> None:
        self._steps = config.steps
        self._limit = None if config.minutes is None else 60 * config.minutes
        self._highest = config.learning_rate
        self._before = 0.0
        self._started = time.monotonic()

    def start(self, before: float) -> None:
        """Begin to count, with the seconds that earlier parts of the run have used."""
        self._before, self._started = before, time.monotonic()

    @property
    def seconds(self) -> float:
        """Time used so far."""
        return self._before + time.monotonic() - self._started

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, 0 being the first: a linear warm-up over 4 % of the run, then a cosine to zero."""
        done = (step + 0.5) / self._steps if self._limit is None else self.seconds / self._limit
        if done < _WARMUP:
            return self._highest * done / _WARMUP
        return self._highest * (0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - _WARMUP) / (1 - _WARMUP))))

    def over(self, step: int) -> bool:
        """Return whether the run ends when `step` steps are done."""
        return step >= self._steps if self._limit is None else self.seconds >= self._limit
