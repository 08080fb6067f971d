"""Settings of a training run, and the schedule that they make: learning rate by step or by time, and the end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ddtree.errors import ConfigError
from ddtree.train.loss import LOSSES, Objective
from ddtree.train.options import option

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
