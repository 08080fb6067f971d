"""When jobs begin: a fixed number at once (closed loop), or as they happen to come (open loop)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ddtree.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """How hard a server is pressed.

    Attributes:
        kind: "concurrency" (closed loop: a job begins when another one ends) or "rate" (open loop: jobs begin as a
            Poisson process does, however slow the answers are).
        value: jobs at once, a whole number; or jobs a second.

    Raises:
        ConfigError: the value is out of range.
    """

    kind: Literal["concurrency", "rate"]
    value: float

    def __post_init__(self) -> None:
        if self.kind == "concurrency" and (self.value != int(self.value) or self.value < 1):
            raise ConfigError(f"concurrency {self.value:g} must be a whole number from 1 up")
        if not 0 < self.value < float("inf"):
            raise ConfigError(f"{self.kind} {self.value:g} must be more than 0")

    def __str__(self) -> str:
        return f"{self.value:g} at once" if self.kind == "concurrency" else f"{self.value:g} a second"

    async def run(self, jobs: Sequence[T], work: Callable[[T], Awaitable[None]], seed: int) -> None:
        """Do `work` for each job, in order of their beginnings; returns when all have ended.

        Args:
            seed: of the arrivals, so that two ways of serving can be given the same ones.
        """
        if self.kind == "concurrency":
            await _closed(jobs, work, int(self.value))
        else:
            await _open(jobs, work, arrivals(len(jobs), self.value, seed))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the beginning, of so many arrivals of a Poisson process; the first one is at 0."""
    generator = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + generator.expovariate(rate))
    return times[:count]


async def _closed(jobs: Sequence[T], work: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    left = iter(jobs)

    async def worker() -> None:
        for job in left:
            await work(job)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(worker())


async def _open(jobs: Sequence[T], work: Callable[[T], Awaitable[None]], times: list[float]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def worker(job: T) -> None:
        await work(job)

    async with asyncio.TaskGroup() as group:
        for job, due in zip(jobs, times, strict=True):
            await asyncio.sleep(began + due - loop.time())
            group.create_task(worker(job))
