"""The measuring: every method answers every prompt, in turn, with the same seed; their texts are compared."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tqdm import tqdm

from ddtree.bench.methods import OFF, DecodingMethod, ModelPair
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.results import ResultsFile
from ddtree.errors import ConfigError
from ddtree.sampling.params import SamplingParams

_WARM_UP_TOKENS = 32

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class BenchPlan:
    """A measurement to make: prompts, temperatures and repetitions.

    Attributes:
        prompts: in the order they are answered.
        temperatures: at which each prompt is answered, such as 0 and 1.
        turns: repetitions of everything.
        messages: most user messages answered of a conversation; None for all.
        max_tokens: most tokens of an answer.
        max_context: of the target, in tokens; prompts that do not leave room for an answer are skipped.
        seed: added to each prompt's own.
    """

    prompts: Sequence[BenchPrompt]
    temperatures: Sequence[float]
    turns: int
    messages: int | None
    max_tokens: int
    max_context: int
    seed: int


@dataclass
class BenchRunner:
    """Measures methods side by side; the first is `off`, and the others' texts are compared with its text.

    Attributes:
        methods: in the order of the tables. They run in another order for each prompt.
        plan: what is measured.
        pair: encodes conversations, decodes answers, and compares answers with the plain one.
        results: file that the figures go to.
        quiet: show no progress.

    Raises:
        ConfigError: the first method is not `off`.
    """

    methods: Sequence[DecodingMethod]
    plan: BenchPlan
    pair: ModelPair
    results: ResultsFile
    quiet: bool = False
    _started: int = 0  # passes through all methods that were begun: each has another order

    def __post_init__(self) -> None:
        if not self.methods or self.methods[0].name != OFF:
            raise ConfigError(
                f"the first way of decoding must be {OFF!r}, which the others are compared with"
            )

    def run(self) -> None:
        """Measure what the file lacks. Raises ConfigError when no prompt leaves room for an answer."""
        plan, finished = self.plan, self.results.done
        steps = list(product(range(plan.turns), plan.prompts, plan.temperatures))
        left = [step for step in steps if (step[1].id, step[2], step[0]) not in finished]
        if not left:
            return
        self._warm_up()
        done = len(steps) - len(left)
        for step in tqdm(left, "measuring", len(steps), initial=done, unit="prompt", disable=self.quiet):
            self.results.write(self._measure(*step))
        for method in self.methods:
            self.results.write(method.learnt())

    def _warm_up(self) -> None:
        """Answer one prompt with each method: first calls reserve memory and compile, and must not be timed."""
        prompts = (self._encode_if_room(_user(prompt.turns[0])) for prompt in self.plan.prompts)
        ids = next((found for found in prompts if found is not None), None)
        if ids is None:
            raise ConfigError(
                f"no prompt leaves room for {self.plan.max_tokens} tokens in the context of "
                f"{self.plan.max_context}: lower --max-tokens"
            )
        most = min(_WARM_UP_TOKENS, self.plan.max_tokens)
        for temperature in self.plan.temperatures:
            for method in self.methods:
                method.answer(ids, SamplingParams(temperature=temperature, seed=0, max_tokens=most))

    def _measure(self, turn: int, prompt: BenchPrompt, temperature: float) -> list[dict[str, Any]]:
        """Return the records of a conversation: each message answered by all methods, going on with `off`'s text."""
        records: list[dict[str, Any]] = []
        history: Messages = []
        key = {"id": prompt.id, "task": prompt.task, "temperature": temperature, "turn": turn}
        for number, text in enumerate(prompt.turns[: self.plan.messages]):
            history += _user(text)
            ids = self._encode_if_room(history)
            if ids is None:
                break
            # The same seed for every method and turn, and whatever other prompts are measured.
            seed = self.plan.seed + zlib.crc32(f"{prompt.id}/{number}".encode())
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=self.plan.max_tokens)
            answers = {method.name: method.answer(ids, params) for method in self._order()}
            plain = answers[OFF].tokens
            for name in (method.name for method in self.methods):
                what = {"message": number, "seed": seed, "cell": name, "prompt_tokens": len(ids)}
                verdict = {"kind": "unchecked"}
                if answers[name].comparable:
                    verdict = self.pair.compare(ids, plain, answers[name].tokens, params)
                records.append({"kind": "run", **key, **what, **answers[name].as_dict(), "verdict": verdict})
            history.append({"role": "assistant", "content": self.pair.decode(plain)})
        for record in records:
            record["messages"] = len(records) // len(self.methods)
        return records or [{"kind": "skipped", **key, "reason": "no room in the context"}]

    def _order(self) -> list[DecodingMethod]:
        """Return the methods in a new order: each is first, and stands after each neighbour, as often as any other."""
        count, self._started = self._started, self._started + 1
        places = count % len(self.methods)
        order = [*self.methods[places:], *self.methods[:places]]
        return order if count % 2 == 0 else order[::-1]

    def _encode_if_room(self, messages: Messages) -> list[int] | None:
        ids = self.pair.encode(messages)
        return ids if len(ids) + self.plan.max_tokens <= self.plan.max_context else None


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]
