"""The measuring: blocks of requests, one after another, each answered in one way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.serving.answer import Answer
from ddtree.bench.serving.counters import Counters
from ddtree.bench.serving.endpoint import Endpoint, EndpointError, Message
from ddtree.bench.serving.jobs import Plan, Step


@dataclass(frozen=True)
class Asked:
    """An answer, and what it answers: message `message` of the conversation `id`, the `place`-th of its block."""

    id: str
    task: str
    place: int
    message: int
    answer: Answer


@dataclass(frozen=True)
class Block:
    """What came of a block.

    Attributes:
        step: what was asked, and how.
        asked: in the order the answers ended.
        seconds: from the first request to the last answer's end.
        counters: the server's, during the block.
    """

    step: Step
    asked: list[Asked]
    seconds: float
    counters: Counters


async def warm_up(endpoint: Endpoint, plan: Plan, tokens: int = 16) -> None:
    """Have each way of drafting answer a short request, as a server's first ones may be slower.

    Raises:
        EndpointError: one is refused.
    """
    for setting in plan.settings:
        message = {"role": "user", "content": plan.prompts[0].turns[0]}
        answer = await endpoint.ask([message], {**_fields(plan, setting.fields), "max_tokens": tokens})
        if not answer.good:
            raise EndpointError(f"drafting {setting.name} is refused: {answer.error}")


async def run(endpoint: Endpoint, plan: Plan, done: Callable[[Block], None]) -> None:
    """Run all blocks; `done` gets each as it ends."""
    for step in plan.steps():
        done(await _block(endpoint, plan, step))


async def _block(endpoint: Endpoint, plan: Plan, step: Step) -> Block:
    asked: list[Asked] = []

    async def converse(job: tuple[int, BenchPrompt]) -> None:
        place, prompt = job
        words = plan.words()
        messages: list[Message] = []
        for number, text in enumerate(prompt.turns[: plan.messages]):
            messages.append({"role": "user", "content": text if number else words + text})
            answer = await endpoint.ask(messages, _fields(plan, step.setting.fields))
            asked.append(Asked(prompt.id, prompt.task, place, number, answer))
            if not answer.good:
                return
            messages.append({"role": "assistant", "content": answer.text})

    before = Counters.read(await endpoint.metrics())
    began = time.perf_counter()
    await step.load.run(list(enumerate(step.prompts)), converse, plan.seed + 1000 * step.turn + step.number)
    seconds = time.perf_counter() - began
    return Block(step, asked, seconds, Counters.read(await endpoint.metrics()) - before)


def _fields(plan: Plan, drafting: dict[str, Any] | None) -> dict[str, Any]:
    if drafting is None:
        return plan.fields
    return {**plan.fields, "ddtree": drafting, "ddtree_timings": True}
