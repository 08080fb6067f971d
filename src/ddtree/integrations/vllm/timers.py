"""Where steps of the engine are timed: requests of our own, of any length, that nothing was computed for."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from ddtree.errors import ConfigError
from ddtree.integrations.vllm.settings import KEY
from ddtree.integrations.vllm.trees import Nodes
from ddtree.policy.stands import Text, binary_tree, uneven_tokens

_SPARE = 64
"""Tokens that a request may grow by while it is timed."""


def runtime(vllm_config: Any) -> str:
    """What runs the steps: two engines of one model take different times where it differs."""
    return f"vLLM {vllm.__version__}, compilation {vllm_config.compilation_config.mode.name}"


class EngineStand:
    """Times steps that verify trees, on a runner that serves nobody yet.

    Args:
        runner: the engine's.
        longest: most committed tokens of a request that will be wanted; cut to what fits.
        rows: most requests at once.
        features: width of what the drafter reads of a token, or 0.

    Attributes:
        text: to draft after; its length is the most that `occupy` can give.

    Raises:
        ConfigError: there is no room for requests to time.
    """

    def __init__(self, runner: Any, longest: int, rows: int, features: int) -> None:
        self._runner = runner
        self._size: int = runner.cache_config.block_size
        self._nodes: int = runner.settings.nodes
        # The first block is the engine's own.
        each = (runner.kv_cache_config.num_blocks - 1) // rows * self._size
        room = min(each, runner.max_model_len) - self._nodes - _SPARE - 1
        longest = min(longest, room)
        if longest < 2:
            raise ConfigError("there is no room to time steps: give more memory for keys and values")
        tokens = uneven_tokens(longest, runner.target.vocab_size)
        told = torch.randn(longest, features, dtype=runner.target.dtype) if features else None
        self.text = Text(tokens, told)
        self._asked = SamplingParams(
            temperature=0.0, max_tokens=2**20, ignore_eos=True, extra_args={KEY: {"method": "off"}}
        )
        self._names: list[str] = []
        self._context = 0
        self._made = 0

    def occupy(self, rows: int, context: int) -> None:
        """Hold that many requests of `context` committed tokens."""
        self.close()
        blocks = -(-(context + self._nodes + _SPARE + 1) // self._size)
        new = []
        for row in range(rows):
            self._made += 1
            self._names.append(f"ddtree-timing-{self._made}")
            tokens = [self.text.tokens[place % len(self.text.tokens)] for place in range(context)]
            own = list(range(1 + row * blocks, 1 + (row + 1) * blocks))
            # What lies in the cache has no bearing on time, so that only the last token needs processing.
            new.append(
                NewRequestData(
                    req_id=self._names[-1],
                    prompt_token_ids=tokens,
                    mm_features=[],
                    sampling_params=self._asked,
                    pooling_params=None,
                    block_ids=(own,),
                    num_computed_tokens=context - 1,
                    lora_request=None,
                )
            )
        self._context = context
        self._step(new, {name: [] for name in self._names})

    def verify(self, width: int) -> float:
        """Seconds of a step that verifies a binary tree of `width` nodes for each request."""
        readers = [self._runner.readers[name] for name in self._names]
        if max(len(reader.tokens) for reader in readers) - self._context > _SPARE - width.bit_length():
            self.occupy(len(self._names), self._context)
            return self.verify(width)
        shape = Nodes.of(binary_tree(width, 1, self.text.tokens, torch.device("cpu")), 0)
        drafted = {}
        for reader in readers:
            reader.drafted = replace(shape, tokens=[reader.tokens[-1], *shape.tokens[1:]])
            drafted[reader.name] = reader.drafted.tokens[1:]
        return self._step([], drafted)

    def close(self) -> None:
        """Let the runner forget the requests."""
        if self._names:
            output = SchedulerOutput.make_empty()
            output.finished_req_ids = set(self._names)
            self._runner.execute_model(output)
            self._names = []

    def _step(self, new: list[NewRequestData], drafted: dict[str, list[int]]) -> float:
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        if not new:
            lengths = [len(self._runner.readers[name].tokens) for name in drafted]
            output.scheduled_cached_reqs = CachedRequestData(
                req_ids=list(drafted),
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * len(drafted),
                num_computed_tokens=[length - 1 for length in lengths],
                num_output_tokens=[
                    length - self._runner.readers[name].prompt_length
                    for name, length in zip(drafted, lengths, strict=True)
                ],
            )
        output.num_scheduled_tokens = {name: len(own) + 1 for name, own in drafted.items()}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.scheduled_spec_decode_tokens = {name: own for name, own in drafted.items() if own}
        started = time.perf_counter()
        self._runner.execute_model(output)
        seconds = time.perf_counter() - started
        self._runner.sample_tokens(None)
        return seconds
