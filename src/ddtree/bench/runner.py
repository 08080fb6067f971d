"""The measuring: every method answers every prompt, in turn, with the same seed; their texts are compared."""

from __future__ import annotations

import os
import platform
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tqdm import tqdm

import ddtree
from ddtree.bench.methods import OFF, DecodingMethod, Measurement
from ddtree.bench.near_ties import first_flip
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.results import ResultsFile, RunKey
from ddtree.errors import ConfigError
from ddtree.policy.cache import device_name
from ddtree.sampling.sampler import SamplingParams

_WARM_UP_TOKENS = 32

Messages = list[dict[str, str]]
Compare = Callable[[list[int], Measurement, Measurement, SamplingParams], dict[str, Any]]


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

    def steps(self) -> Iterator[tuple[BenchPrompt, float, int]]:
        """Yield prompt, temperature and turn of everything, in order."""
        for turn in range(self.turns):
            for prompt in self.prompts:
                for temperature in self.temperatures:
                    yield prompt, temperature, turn


class BenchRunner:
    """Measures methods side by side; the first is `off`, and the others' texts are compared with its text.

    Args:
        methods: in the order of the tables. They run in another order for each prompt.
        plan: what is measured.
        encode: gives the token ids of a conversation.
        decode: gives the text of an answer, with which a conversation goes on.
        compare: gives the verdict on an answer, from prompt, plain answer, answer and parameters.
        results: file that the figures go to.
        quiet: show no progress.
    """

    def __init__(
        self,
        methods: Sequence[DecodingMethod],
        plan: BenchPlan,
        *,
        encode: Callable[[Messages], list[int]],
        decode: Callable[[list[int]], str],
        compare: Compare,
        results: ResultsFile,
        quiet: bool = False,
    ) -> None:
        if not methods or methods[0].name != OFF:
            raise ConfigError(
                f"the first way of decoding must be {OFF!r}, which the others are compared with"
            )
        self._methods = list(methods)
        self._plan = plan
        self._encode, self._decode, self._compare = encode, decode, compare
        self._results = results
        self._quiet = quiet
        self._started = 0  # passes through all methods that were begun: each has another order

    def run(self) -> None:
        """Measure what the file lacks. Raises ConfigError when no prompt leaves room for an answer."""
        steps = list(self._plan.steps())
        left = [step for step in steps if _key(*step) not in self._results.done]
        if not left:
            return
        self._warm_up()
        done = len(steps) - len(left)
        for step in tqdm(left, "measuring", len(steps), initial=done, unit="prompt", disable=self._quiet):
            self._results.write(self._measure(*step))
        for method in self._methods:
            self._results.write(method.learnt())

    def _warm_up(self) -> None:
        """Answer one prompt with each method: first calls reserve memory and compile, and must not be timed."""
        prompts = (self._encode_if_room(_user(prompt.turns[0])) for prompt in self._plan.prompts)
        ids = next((found for found in prompts if found is not None), None)
        if ids is None:
            raise ConfigError(
                f"no prompt leaves room for {self._plan.max_tokens} tokens in the context of "
                f"{self._plan.max_context}: lower --max-tokens"
            )
        most = min(_WARM_UP_TOKENS, self._plan.max_tokens)
        for temperature in self._plan.temperatures:
            for method in self._methods:
                method.answer(ids, SamplingParams(temperature=temperature, seed=0, max_tokens=most))

    def _measure(self, prompt: BenchPrompt, temperature: float, turn: int) -> list[dict[str, Any]]:
        """Return the records of a conversation: each message answered by all methods, going on with `off`'s text."""
        records: list[dict[str, Any]] = []
        history: Messages = []
        key = {"id": prompt.id, "task": prompt.task, "temperature": temperature, "turn": turn}
        answered = 0
        for text in prompt.turns[: self._plan.messages]:
            history += _user(text)
            ids = self._encode_if_room(history)
            if ids is None:
                break
            # The same seed for every method and turn, and whatever other prompts are measured.
            seed = self._plan.seed + zlib.crc32(f"{prompt.id}/{answered}".encode())
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=self._plan.max_tokens)
            answers = {method.name: method.answer(ids, params) for method in self._order()}
            plain = answers[OFF]
            for method in self._methods:
                answer = answers[method.name]
                verdict = {"kind": "equal"}
                if answer is not plain:
                    verdict = self._compare(ids, plain, answer, params)
                what = {"message": answered, "seed": seed, "cell": method.name, "prompt_tokens": len(ids)}
                records.append({"kind": "run", **key, **what, **answer.as_dict(), "verdict": verdict})
            history.append({"role": "assistant", "content": self._decode(plain.tokens)})
            answered += 1
        for record in records:
            record["messages"] = answered
        return records or [{"kind": "skipped", **key, "reason": "no room in the context"}]

    def _order(self) -> list[DecodingMethod]:
        """Return the methods in a new order: each is first, and stands after each neighbour, as often as any other."""
        count, self._started = self._started, self._started + 1
        places = count % len(self._methods)
        order = self._methods[places:] + self._methods[:places]
        return order if count % 2 == 0 else order[::-1]

    def _encode_if_room(self, messages: Messages) -> list[int] | None:
        ids = self._encode(messages)
        return ids if len(ids) + self._plan.max_tokens <= self._plan.max_context else None


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _key(prompt: BenchPrompt, temperature: float, turn: int) -> RunKey:
    return prompt.id, temperature, turn


def compare_outputs(
    target: Any, prompt: list[int], plain: Measurement, other: Measurement, params: SamplingParams
) -> dict[str, Any]:
    """Compare an answer with plain decoding's; return the verdict as plain JSON values.

    Its `kind` is "equal", "near-tie", "different" or "unchecked"; where the texts differ it also says at which token
    and by which gap. Half precision may flip a near-tie (`ddtree.bench.near_ties`). In float32 any difference counts.
    """
    if not other.comparable:
        return {"kind": "unchecked"}
    if plain.tokens == other.tokens:
        return {"kind": "equal"}
    flip = first_flip(target, prompt, plain.tokens, other.tokens, params.temperature, params.seed or 0)
    assert flip is not None
    return {
        "kind": "near-tie" if flip.near_tie and target.dtype != torch.float32 else "different",
        "at": flip.index,
        "tokens": list(flip.tokens),
        "gap": None if flip.gap == float("inf") else round(flip.gap, 6),
        "noise": round(flip.noise, 6),
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return processor, cores this process may use, threads, accelerator and system as plain JSON values."""
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
    """Return the versions of ddtree, torch, transformers and Python."""
    return {
        "ddtree": ddtree.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def busy_warning() -> str | None:
    """Return a warning where other programs keep this machine's cores busy; None where it is idle or not known."""
    if sys.platform == "win32":
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores:
        return None
    return f"this machine is busy (load {load:.1f} on {cores} cores): the times will be too long, and uneven"
