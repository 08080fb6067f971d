"""The measuring: every way of decoding answers every prompt, in turn, with the same seed."""

from __future__ import annotations

import os
import platform
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

import ddtree
from ddtree.bench.methods import OFF_CELL as PLAIN
from ddtree.bench.methods import Answer, Way
from ddtree.bench.near_ties import first_flip
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.results import Group, Log
from ddtree.errors import ConfigError
from ddtree.policy.machine import device_name
from ddtree.progress import ProgressLine
from ddtree.sampling.sampler import SamplingParams

_WARM_UP_TOKENS = 32

Encode = Callable[[list[dict[str, str]]], list[int]]
Judge = Callable[[list[int], Answer, Answer, SamplingParams], dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        prompts: in the order they are answered.
        temperatures: of each prompt.
        turns: how often everything is measured, in turn.
        messages: most user messages answered of a conversation; None for all.
        max_tokens: most tokens of an answer.
        max_context: of the target; prompts that do not leave room are passed over.
        seed: added to each prompt's own.
    """

    prompts: Sequence[BenchPrompt]
    temperatures: Sequence[float]
    turns: int
    messages: int | None
    max_tokens: int
    max_context: int
    seed: int

    def groups(self) -> Iterator[tuple[BenchPrompt, float, int]]:
        for turn in range(self.turns):
            for prompt in self.prompts:
                for temperature in self.temperatures:
                    yield prompt, temperature, turn


class Runner:
    """Measures ways of decoding side by side; the first is `off`, and the others' texts are held against its text.

    Args:
        ways: in the order of the tables. They are run in an order that is another one for each prompt.
        plan: what is measured.
        encode: the token ids of a conversation.
        decode: the text of an answer, which a conversation goes on from.
        judge: the verdict on an answer: prompt, plain answer, answer, parameters.
        log: where the figures go.
        progress: told how much is done; None for a line on standard error.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        plan: Plan,
        *,
        encode: Encode,
        decode: Callable[[list[int]], str],
        judge: Judge,
        log: Log,
        progress: ProgressLine | None = None,
    ) -> None:
        if not ways or ways[0].name != PLAIN:
            raise ConfigError(
                f"the first way of decoding must be {PLAIN!r}, which the others are compared with"
            )
        self._ways = list(ways)
        self._plan = plan
        self._encode, self._decode, self._judge = encode, decode, judge
        self._log = log
        self._progress = progress
        self._started = 0  # how many rounds through all ways were begun: each has another order

    def run(self) -> None:
        """Measure what the log lacks. Raises ConfigError when no prompt leaves room for an answer."""
        left = [one for one in self._plan.groups() if _key(*one) not in self._log.done]
        total = len(self._plan.prompts) * len(self._plan.temperatures) * self._plan.turns
        if not left:
            return
        progress = self._progress or ProgressLine("measuring", total, "prompts")
        progress.update(total - len(left), "warming up")
        self._warm_up()
        for place, (prompt, temperature, turn) in enumerate(left, total - len(left)):
            progress.update(place, prompt.id)
            self._log.write(self._measure(prompt, temperature, turn))
        for way in self._ways:
            self._log.write(way.learnt())
        progress.update(total)
        progress.close()

    def _warm_up(self) -> None:
        """First calls reserve memory, compile and measure; none of that shall be in the figures."""
        prompts = (self._fitting(_user(prompt.turns[0])) for prompt in self._plan.prompts)
        ids = next((found for found in prompts if found is not None), None)
        if ids is None:
            raise ConfigError(
                f"no prompt leaves room for {self._plan.max_tokens} tokens in the context of "
                f"{self._plan.max_context}: lower --max-tokens"
            )
        for temperature in self._plan.temperatures:
            params = SamplingParams(
                temperature=temperature, seed=0, max_tokens=min(_WARM_UP_TOKENS, self._plan.max_tokens)
            )
            for way in self._ways:
                way.answer(ids, params)

    def _measure(self, prompt: BenchPrompt, temperature: float, turn: int) -> list[dict[str, Any]]:
        """The records of a conversation: every message answered in every way, all of them going on from `off`."""
        records: list[dict[str, Any]] = []
        history: list[dict[str, str]] = []
        key = {"id": prompt.id, "task": prompt.task, "temperature": temperature, "turn": turn}
        texts = prompt.turns[: self._plan.messages]
        answered = 0
        for text in texts:
            history += _user(text)
            ids = self._fitting(history)
            if ids is None:
                break
            params = SamplingParams(
                temperature=temperature, seed=self._seed(prompt, answered), max_tokens=self._plan.max_tokens
            )
            answers = {way.name: way.answer(ids, params) for way in self._order()}
            plain = answers[PLAIN]
            for way in self._ways:
                answer = answers[way.name]
                verdict = {"kind": "equal"} if answer is plain else self._judge(ids, plain, answer, params)
                what = {"message": answered, "seed": params.seed, "cell": way.name, "prompt_tokens": len(ids)}
                records.append({"kind": "run", **key, **what, **answer.as_dict(), "verdict": verdict})
            history.append({"role": "assistant", "content": self._decode(plain.tokens)})
            answered += 1
        for record in records:
            record["messages"] = answered
        return records or [{"kind": "skipped", **key, "reason": "no room in the context"}]

    def _order(self) -> list[Way]:
        """Each way comes first as often as any other, and after each neighbour as often as before it."""
        count, self._started = self._started, self._started + 1
        places = count % len(self._ways)
        order = self._ways[places:] + self._ways[:places]
        return order if count % 2 == 0 else order[::-1]

    def _fitting(self, messages: list[dict[str, str]]) -> list[int] | None:
        ids = self._encode(messages)
        return ids if len(ids) + self._plan.max_tokens <= self._plan.max_context else None

    def _seed(self, prompt: BenchPrompt, message: int) -> int:
        """The same for every way and turn, and whatever other prompts are measured."""
        return self._plan.seed + zlib.crc32(f"{prompt.id}/{message}".encode())


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _key(prompt: BenchPrompt, temperature: float, turn: int) -> Group:
    return prompt.id, temperature, turn


Kind = Literal["equal", "near-tie", "different", "unchecked"]


def judge(
    target: Any, prompt: list[int], plain: Answer, other: Answer, params: SamplingParams
) -> dict[str, Any]:
    """The verdict on an answer as plain JSON values: its `kind`, and where and by how much the two texts part.

    Half precision may flip a near-tie (`ddtree.flips`). In float32 any difference counts as one.
    """
    if not other.comparable:
        return {"kind": "unchecked"}
    if plain.tokens == other.tokens:
        return {"kind": "equal"}
    flip = first_flip(target, prompt, plain.tokens, other.tokens, params.temperature, params.seed or 0)
    assert flip is not None
    kind: Kind = "near-tie" if flip.near_tie and target.dtype != torch.float32 else "different"
    gap = None if flip.gap == float("inf") else round(flip.gap, 6)
    return {
        "kind": kind,
        "at": flip.index,
        "tokens": list(flip.tokens),
        "gap": gap,
        "noise": round(flip.noise, 6),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Plain JSON values: processor, cores this process may use, threads, accelerator, system."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "processor": device_name(torch.device("cpu")),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type != "cpu":
        found["accelerator"] = device_name(device)
    return found


def versions() -> dict[str, str]:
    return {
        "ddtree": ddtree.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
