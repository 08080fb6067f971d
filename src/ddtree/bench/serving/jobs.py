"""What is asked, and in which blocks, so that ways of drafting are compared fairly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from typing import Any

from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.serving.arrivals import Load
from ddtree.bench.serving.settings import Setting
from ddtree.errors import ConfigError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        prompts: conversations, in the order they are asked; they begin anew where a load asks for more.
        loads: one after another.
        settings: ways of drafting; at each load they take turns, block by block.
        turns: how often everything is measured.
        requests: conversations of a load, a setting and a turn; None for each prompt once, and 4 for each of those at
            once.
        block: conversations of a block; None for 1 where one is asked at a time, all where they come at a rate, and
            else 4 for each of those at once, so that little of the time goes by with fewer than that.
        messages: most user messages asked of a conversation; None for all.
        fresh: begin each conversation with words of its own, so that no server knows its beginning.
        fields: of each request.
        seed: of arrivals.
    """

    prompts: Sequence[BenchPrompt]
    loads: Sequence[Load]
    settings: Sequence[Setting]
    turns: int = 1
    requests: int | None = None
    block: int | None = None
    messages: int | None = None
    fresh: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("turns", "requests", "block", "messages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value} must be at least 1")
        most = max((load.value for load in self.loads if load.kind == "concurrency"), default=0)
        for name in ("requests", "block"):
            value = getattr(self, name)
            if value is not None and value < most:
                raise ConfigError(f"--{name} {value} is less than the {most:g} that shall be asked at once")

    def blocks(self, load: Load) -> list[list[BenchPrompt]]:
        """The conversations of a load in a turn, in blocks of nearly one size."""
        chosen = list(islice(cycle(self.prompts), self._requests(load)))
        count = max(1, len(chosen) // self._block(load, len(chosen)))
        size, more = divmod(len(chosen), count)
        starts = [number * size + min(number, more) for number in range(count + 1)]
        return [chosen[start:stop] for start, stop in pairwise(starts)]

    def order(self, number: int) -> list[Setting]:
        """The settings as block `number` runs them: each is as often first, second and so on as the others."""
        first = number % len(self.settings)
        return [*self.settings[first:], *self.settings[:first]]

    def steps(self) -> Iterator[Step]:
        """All blocks in the order they are run."""
        number = 0
        for turn in range(self.turns):
            for load in self.loads:
                for place, prompts in enumerate(self.blocks(load)):
                    for setting in self.order(number):
                        yield Step(load, setting, turn, place, prompts)
                    number += 1

    def words(self) -> str:
        """Some words that no conversation began with, or none unless conversations are to be fresh."""
        return salt(random.Random()) + "\n" if self.fresh else ""

    def _requests(self, load: Load) -> int:
        if self.requests is not None:
            return self.requests
        return max(len(self.prompts), 4 * int(load.value) if load.kind == "concurrency" else 0)

    def _block(self, load: Load, requests: int) -> int:
        if self.block is not None:
            return self.block
        if load.kind == "rate":
            return requests
        return 1 if load.value == 1 else 4 * int(load.value)


@dataclass(frozen=True)
class Step:
    """A block, served in one way."""

    load: Load
    setting: Setting
    turn: int
    number: int
    prompts: list[BenchPrompt]


def salt(generator: random.Random) -> str:
    """Words to begin a text with that a server has not seen; all are equally long."""
    return "(" + " ".join("".join(generator.choices(_LETTERS, k=4)) for _ in range(4)) + ")"
