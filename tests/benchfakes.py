"""Methods of decoding that answer without a model, and results made with them."""

from collections import Counter
from pathlib import Path
from typing import Any

from ddtree.bench.methods import Measurement
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.results import Results, ResultsFile, read
from ddtree.bench.runner import BenchPlan, BenchRunner
from ddtree.sampling.params import SamplingParams
from ddtree.stats import Stats

TEXT = (3, 1, 4, 1, 5, 9, 2, 6)


class FakeMethod:
    """Answers with the same tokens, at a pace of its own; notes what it was asked."""

    def __init__(self, name: str, pace: float = 1.0, tokens: tuple[int, ...] = TEXT, tau: int = 1) -> None:
        self.name = name
        self.pace, self.tokens, self.tau = pace, tokens, tau
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.order: list[str] = []

    def answer(self, prompt: list[int], params: SamplingParams) -> Measurement:
        self.asked.append((prompt, params))
        self.order.append(self.name)
        tokens = list(self.tokens)
        rounds = max(1, (len(tokens) - 1) // self.tau)
        # Longer prompts and hotter answers go slower, so that medians and quartiles have something to tell apart.
        slow = 1 + len(prompt) / 10 + params.temperature + 0.01 * (len(self.asked) % 3)
        decode = slow * (len(tokens) - 1) / (10 * self.pace)
        seconds = {
            "prefill": 0.5,
            "draft": 0.1,
            "build": 0.01,
            "verify": decode / 2,
            "walk": 0.02,
            "commit": 0.01,
        }
        stats = Stats(
            total=0.5 + decode, ttft=0.5, rounds=rounds, nodes=4 * rounds, accepted=Counter({self.tau - 1: rounds}),
            seconds=seconds, arms=Counter({self.name: rounds}),
        )  # fmt: skip
        return Measurement(tokens, stats, comparable=self.name != "hf" or params.greedy)

    def learnt(self) -> list[dict[str, Any]]:
        if "auto" not in self.name:
            return []
        return [
            {"kind": "policy", "cell": self.name, "state": {"arms": [self.name]}},
            {
                "kind": "latency",
                "cell": self.name,
                "context": 9.0,
                "widths": [1, 2, 4, 8],
                "seconds": [1, 1, 2, 3],
            },
        ]


def methods(*names: str) -> list[FakeMethod]:
    """One for each name, each faster than the one before."""
    order: list[str] = []
    made = [
        FakeMethod(name, 1 + 0.3 * place, tau=1 if name == "off" else 2) for place, name in enumerate(names)
    ]
    for method in made:
        method.order = order
    return made


def prompts(per_task: int = 3) -> list[BenchPrompt]:
    return [
        BenchPrompt(f"{task}-{n}", task, ("x" * (n + place),)) for n in range(1, per_task + 1)
        for place, task in enumerate(("chat", "code"))
    ]  # fmt: skip


def plan(chosen: list[BenchPrompt] | None = None, **changes: Any) -> BenchPlan:
    settings: dict[str, Any] = {
        "prompts": prompts() if chosen is None else chosen, "temperatures": (0.0, 1.0), "turns": 1, "messages": None,
        "max_tokens": 8, "max_context": 64, "seed": 0,
    }  # fmt: skip
    return BenchPlan(**{**settings, **changes})


def header(cells: list[str], baselines: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-29T12:00:00+00:00",
        "command": "ddtree bench",
        "machine": {"processor": "an abacus", "cores": 2, "threads": 1, "system": "Wood"},
        "versions": {"ddtree": "0.1.0", "torch": "2.13.0"},
        "settings": {
            "target": "tiny", "drafter": "lookup", "dtype": "float32", "cells": cells, "baselines": list(baselines),
            "temperatures": [0.0, 1.0], "prompts": ["small"], "max_tokens": 8, "turns": 1, **settings,
        },
    }  # fmt: skip


class FakePair:
    """Stands for a model of one token a byte; every difference of two texts counts."""

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        return list("".join(message["content"] for message in messages).encode())

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)

    def compare(
        self, prompt: list[int], plain: list[int], other: list[int], params: SamplingParams
    ) -> dict[str, Any]:
        return (
            {"kind": "equal"} if plain == other else {"kind": "different", "at": 1, "gap": 0.5, "noise": 0.1}
        )


def runner(results: ResultsFile, made: list[FakeMethod], chosen: BenchPlan | None = None) -> BenchRunner:
    return BenchRunner(made, chosen or plan(), FakePair(), results, quiet=True)


def measured(path: Path, names: list[str], baselines: tuple[str, ...] = (), turns: int = 1) -> Results:
    """Results of some fake methods."""
    with ResultsFile(path, header(names, baselines, turns=turns)) as results:
        runner(results, methods(*names, *baselines), plan(turns=turns)).run()
    return read(path)
