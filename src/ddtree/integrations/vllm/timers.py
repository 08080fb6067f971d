"""Times steps of vLLM's engine for the calibration, with dummy requests whose prompts were never processed."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from ddtree.errors import ConfigError
from ddtree.integrations.vllm.settings import KEY
from ddtree.policy.calibration import binary_tree, uneven_tokens

_SPARE = 64
"""Tokens that a request may grow by while it is timed."""


def runtime(vllm_config: Any) -> str:
    """Return the name of what runs the steps; two engines of one model take different times where it differs."""
    return f"vLLM {vllm.__version__}, compilation {vllm_config.compilation_config.mode.name}"


class EngineTimer:
    """Times steps that verify trees, on a runner that serves nobody yet.

    Args:
        runner: the engine's `TreeRunner`.
        longest: most committed tokens of a request that will be wanted, e.g. 512; cut to what fits.

    Attributes:
        longest: the longest context that `setup` can give to one request.

    Raises:
        ConfigError: there is no room for requests to time.
    """

    def __init__(self, runner: Any, longest: int) -> None:
        self._runner = runner
        self._block_size: int = runner.cache_config.block_size
        self._spare: int = runner.settings.nodes + _SPARE + 1
        # The first block is the engine's own.
        room = (runner.kv_cache_config.num_blocks - 1) * self._block_size
        self.longest = min(longest, min(room, runner.max_model_len) - self._spare)
        if self.longest < 2:
            raise ConfigError("there is no room to time steps: give more memory for keys and values")
        self._tokens = uneven_tokens(max(self.longest, self._spare), runner.target.vocab_size)
        self._params = SamplingParams(
            temperature=0.0, max_tokens=2**20, ignore_eos=True, extra_args={KEY: {"method": "off"}}
        )
        self._names: list[str] = []
        self._context = 0

    def setup(self, rows: int, context: int) -> None:
        """Hold that many requests of `context` committed tokens."""
        self.close()
        self._context = context
        blocks = -(-(context + self._spare) // self._block_size)
        output = SchedulerOutput.make_empty()
        # The values in the cache have no bearing on time, so that only the last token needs processing.
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=f"ddtree-timing-{row}",
                prompt_token_ids=self._tokens[:context],
                mm_features=[],
                sampling_params=self._params,
                pooling_params=None,
                block_ids=(list(range(1 + row * blocks, 1 + (row + 1) * blocks)),),
                num_computed_tokens=context - 1,
                lora_request=None,
            )
            for row in range(rows)
        ]
        self._names = [new.req_id for new in output.scheduled_new_reqs]
        self._step(output, {name: [] for name in self._names})

    def verify(self, width: int) -> float:
        """Return the seconds of a step that verifies a binary tree of `width` nodes for each request."""
        states = [self._runner.states[name] for name in self._names]
        if max(len(state.tokens) for state in states) - self._context > _SPARE - width.bit_length():
            self.setup(len(self._names), self._context)
            return self.verify(width)
        for state in states:
            state.drafted = binary_tree(width, 1, [state.tokens[-1], *self._tokens], torch.device("cpu"))
        lengths = [len(state.tokens) for state in states]
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=self._names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(states),
            num_computed_tokens=[length - 1 for length in lengths],
            num_output_tokens=[length - self._context for length in lengths],
        )
        return self._step(output, {state.name: state.drafted.tokens[0, 1:].tolist() for state in states})

    def close(self) -> None:
        """Let the runner forget the requests."""
        if self._names:
            output = SchedulerOutput.make_empty()
            output.finished_req_ids = set(self._names)
            self._runner.execute_model(output)
            self._names = []

    def _step(self, output: SchedulerOutput, drafted: dict[str, list[int]]) -> float:
        output.num_scheduled_tokens = {name: len(own) + 1 for name, own in drafted.items()}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.scheduled_spec_decode_tokens = {name: own for name, own in drafted.items() if own}
        started = time.perf_counter()
        self._runner.execute_model(output)
        seconds = time.perf_counter() - started
        self._runner.sample_tokens(None)
        return seconds
