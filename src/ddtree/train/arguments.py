"""Settings of the steps of `ddtree train`: dataclasses whose fields are command-line options too."""

from __future__ import annotations

import argparse
import math
import time
import types
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ddtree.drafters.dflash.heads import KINDS
from ddtree.errors import ConfigError

Settings = TypeVar("Settings")

LOSSES = ("ce", "kl", "dpace")
ROWS_ON_ACCELERATORS = 4096
_WARMUP = 0.04


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


@dataclass(frozen=True)
class SynthesisConfig:
    """Settings of a synthesis run. Each field's help describes it; user messages are sampled at temperature 1.

    Raises:
        ConfigError: a setting is out of range.
    """

    tokens: int = option(1_000_000, "answer tokens wanted (default: %(default)s)")
    max_turn: int = option(112, "tokens of a user turn that the target writes (default: %(default)s)")
    max_prompt: int = option(
        512, "tokens of a given user turn; longer ones are left out (default: %(default)s)"
    )
    max_answer: int = option(288, "tokens of an answer (default: %(default)s)")
    greedy_share: float = option(
        0.5, "share of greedy answers; the others are sampled (default: %(default)s)"
    )
    rows: int = option(
        192,
        f"conversations at once (default: 192 on a CPU, {ROWS_ON_ACCELERATORS} elsewhere)",
        default=None,
    )
    turn_top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "max_turn", "max_prompt", "max_answer"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"greedy_share={self.greedy_share} is outside 0..1")
        if not 0 < self.turn_top_p <= 1:
            raise ConfigError(f"turn_top_p={self.turn_top_p} is outside (0, 1]")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} is outside 0..2**63 - 1")


@dataclass(frozen=True)
class Objective:
    """The loss to minimize.

    Attributes:
        loss: "ce", the cross-entropy with the label; "kl", the divergence from the target's distribution over the
            draft vocabulary, whatever token came (up to a constant, its cross-entropy); "dpace", the cross-entropy
            with weights that are the derivative of the expected accepted length (D-PACE, arXiv 2605.18810).
        gamma: decay of the slots' weights; not read by "dpace", which has its own.
        soft: share of the target's distribution in the label of "ce" and "dpace", 0..1.
        alpha: of "dpace": slot k is taken for right with probability (1 - alpha) * p_k + alpha.
    """

    loss: str = "ce"
    gamma: float = 4.0
    soft: float = 0.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(f"loss={self.loss!r} is unknown; use {', '.join(LOSSES)}")
        if not (self.gamma > 0 and 0 <= self.soft <= 1 and 0 <= self.alpha <= 1):
            raise ConfigError("gamma must be positive, and soft and alpha within 0..1")

    @property
    def share(self) -> float:
        """Share of the target's distribution in the label."""
        return 1.0 if self.loss == "kl" else self.soft


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
        self.start(0.0)

    def start(self, before: float) -> None:
        """Begin to count, with the seconds that earlier parts of the run have used."""
        self._started = time.monotonic() - before

    @property
    def seconds(self) -> float:
        """Time used so far."""
        return time.monotonic() - self._started

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, 0 being the first: a linear warm-up over 4 % of the run, then a cosine to zero."""
        done = (step + 0.5) / self._steps if self._limit is None else self.seconds / self._limit
        if done < _WARMUP:
            return self._highest * done / _WARMUP
        return self._highest * (0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - _WARMUP) / (1 - _WARMUP))))

    def over(self, step: int) -> bool:
        """Return whether the run ends when `step` steps are done."""
        return step >= self._steps if self._limit is None else self.seconds >= self._limit


@dataclass(frozen=True)
class DrafterOptions:
    """Settings of the step `fit` beside those of the training. Each field's help describes it."""

    features: str | None = option(
        None,
        "compute the target's features in every step, or read them from the disk, made first if need be "
        "(default: online where they are not there, except on a CPU)",
        choices=("online", "cached"),
    )
    draft_layers: int = option(2, "default: %(default)s")
    block: int = option(8, "block size, bonus token included (default: %(default)s)")
    mask_token: int | None = option(None, "token id of the masked slots (default: an unused one)")
    draft_vocabulary: int = option(8192, "tokens; 0 for all (default: %(default)s)")
    table_megabytes: float = option(4.0, "n-gram table; 0 for none (default: %(default)s)")
    traces: int = option(16, "answers to fit the noise coupling on; 0 leaves it out")


@dataclass(frozen=True)
class HeadOptions:
    """Settings of the step `heads`. Each field's help describes it."""

    heads: list[str] = option(
        [],
        f"{', '.join(KINDS)}, each with settings of its own, as in markov:rank=256",
        metavar="KIND[:NAME=VALUE,...]",
    )
    head_steps: int = option(1000, "default: %(default)s")
    head_minutes: float | None = option(None, "length by the clock, in place of a number of steps")
    head_learning_rate: float = option(1e-3, "default: %(default)s")
    head_loss: str | None = option(
        None, "of all heads (default: kl, but ce for domino; --soft mixes)", choices=LOSSES
    )


@dataclass(frozen=True)
class EvaluationOptions:
    """Settings of the step `evaluate`. Each field's help describes it."""

    answers: Path | None = option(None, "a shard to evaluate on beside the held-out answers")
    budgets: list[int] = option([8, 16, 32], "default: 8 16 32")
    limit: int = option(200, "most conversations of a set (default: %(default)s)")
