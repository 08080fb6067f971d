"""Figures out of answers: percentiles, throughput, goodput, ratios. Knows no endpoints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from ddtree.bench.serving.answer import Answer
from ddtree.bench.serving.counters import Counters
from ddtree.bench.serving.runner import Block

PERCENTILES = (50, 90, 95, 99)
MEASURES = ("ttft", "tpot", "itl_chunk", "itl_token", "latency")


@dataclass(frozen=True)
class Limits:
    """What an answer must keep to, to count as good; in seconds, None for no limit."""

    ttft: float | None = None
    tpot: float | None = None

    @property
    def given(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def kept(self, answer: Answer) -> bool:
        """An answer of one token has no time a token, and keeps to any."""
        if not answer.good:
            return False
        if self.ttft is not None and (answer.ttft is None or answer.ttft > self.ttft):
            return False
        return self.tpot is None or answer.tpot is None or answer.tpot <= self.tpot


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of 100 lie, between two of them in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None where there are no values."""
    if not values:
        return None
    return {"mean": statistics.fmean(values)} | {
        f"p{share}": percentile(values, share) for share in PERCENTILES
    }


class Group:
    """Blocks of one load, served in one way.

    Attributes:
        blocks: of all turns.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.answers = [asked.answer for block in blocks for asked in block.asked]
        self._good = [answer for answer in self.answers if answer.good]
        self.seconds = sum(block.seconds for block in blocks)

    @property
    def failed(self) -> int:
        return len(self.answers) - len(self._good)

    @property
    def tokens(self) -> int:
        """Of all good answers, as far as the server told."""
        return sum(answer.output_tokens or 0 for answer in self._good)

    @property
    def throughput(self) -> float:
        """Output tokens a second, of all answers together."""
        return self.tokens / self.seconds

    @property
    def counters(self) -> Counters:
        return reduce(add, (block.counters for block in self.blocks), Counters())

    def spread(self, measure: str) -> dict[str, float] | None:
        """Of one of `MEASURES`, in seconds; None where it is not known of all good answers."""
        values: list[float] = []
        for answer in self._good:
            if measure == "itl_chunk":
                values += answer.chunk_gaps
            elif measure == "itl_token":
                gaps = answer.token_gaps
                if gaps is None:
                    return None
                values += gaps
            elif (value := getattr(answer, measure)) is not None:
                values.append(value)
        return spread(values)

    def goodput(self, limits: Limits) -> float:
        """Answers a second that kept to the limits."""
        return sum(map(limits.kept, self.answers)) / self.seconds

    def over(self, other: Group) -> float | None:
        """How many times as many tokens a second as another way: the median over blocks, each beside the other's."""
        theirs = {(block.step.turn, block.step.number): speed(block) for block in other.blocks}
        ratios = [
            speed(block) / base
            for block in self.blocks
            if (base := theirs.get((block.step.turn, block.step.number)))
        ]
        return statistics.median(ratios) if ratios else None

    def figures(self, limits: Limits) -> dict[str, Any]:
        """As plain JSON values; times in seconds."""
        known = sum(answer.prompt_tokens or 0 for answer in self._good)
        return {
            "requests": len(self.answers),
            "failed": self.failed,
            "seconds": self.seconds,
            "requests_per_second": len(self._good) / self.seconds,
            "prompt_tokens": known,
            "cached_tokens": sum(answer.cached_tokens for answer in self._good),
            "output_tokens": self.tokens,
            "tokens_per_second": self.throughput,
            "goodput": self.goodput(limits) if limits.given else None,
            **{measure: self.spread(measure) for measure in MEASURES},
            "acceptance": self.counters.record(),
        }


def speed(block: Block) -> float:
    """Output tokens a second."""
    return Group([block]).throughput


def groups(blocks: Sequence[Block]) -> dict[tuple[str, str], Group]:
    """Blocks by load and setting, both in the order they first came."""
    loads = dict.fromkeys(str(block.step.load) for block in blocks)
    settings = dict.fromkeys(block.step.setting.name for block in blocks)
    found: dict[tuple[str, str], list[Block]] = {(load, one): [] for load in loads for one in settings}
    for block in blocks:
        found[str(block.step.load), block.step.setting.name].append(block)
    return {key: Group(of_one) for key, of_one in found.items() if of_one}


def agreement(blocks: Sequence[Block]) -> dict[tuple[str, str], tuple[int, int]]:
    """Of each load and setting, how many answers have the text that the same message got first, and of how many."""
    first: dict[tuple[str, int], str] = {}
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for block in blocks:
        key = (str(block.step.load), block.step.setting.name)
        for asked in block.asked:
            if asked.answer.good:
                text = first.setdefault((asked.id, asked.message), asked.answer.text)
                same, all_ = found.get(key, (0, 0))
                found[key] = (same + (text == asked.answer.text), all_ + 1)
    return found
