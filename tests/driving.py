"""Helpers of tests that run an engine."""

from typing import Any

from ddtree.engine.engine import Engine
from ddtree.engine.sequence import Sequence
from ddtree.sampling.params import SamplingParams


def greedy(max_tokens: int = 40, **changes: Any) -> SamplingParams:
    """Parameters of a greedy answer."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **changes})


def finish(engine: Engine) -> None:
    """Step until nothing is left to do."""
    while not engine.idle:
        engine.step()


def answered(engine: Engine, *asked: tuple[list[int], SamplingParams], **options: Any) -> list[Sequence]:
    """The sequences of prompts with their parameters, decoded in one batch."""
    sequences = [engine.add(prompt, params, **options) for prompt, params in asked]
    finish(engine)
    return sequences
