"""What the worker knows of one request: its text, and how it is sampled and drafted for."""

from __future__ import annotations

from typing import Any

from ddtree.engine.planner import Planner, unmeasured
from ddtree.integrations.vllm import requests
from ddtree.integrations.vllm.settings import Settings
from ddtree.integrations.vllm.trees import Nodes
from ddtree.policy import OFF
from ddtree.sampling.sampler import Sampler


class Reader:
    """A request as the worker sees it, from its first step until it is finished.

    Args:
        name: the engine's id of it.
        state: the runner's own record of it.
        settings: of the worker.
        vocab_size: of the logits.
        planner: says what of its wishes for drafting can be had.

    Attributes:
        tokens: prompt and output; the last one chosen is not yet in the cache.
        request: how it is drafted for.
        seen: tokens whose features were told, or are known to be missing.
        drafted: the tree that the scheduler was sent last.
        arm: how the last tree was drafted.
        fresh: nothing was planned for it yet.
        ended: no token will be added.

    Raises:
        ConfigError: the request asks for what is not supported; the front end refuses such requests.
    """

    def __init__(self, name: str, state: Any, settings: Settings, vocab_size: int, planner: Planner) -> None:
        params = state.sampling_params
        asked = requests.asked(params.extra_args)
        sampling = requests.within(requests.sampling(params, asked), vocab_size)
        self.name = name
        self.tokens: list[int] = [*state.prompt_token_ids, *state.output_token_ids]
        self.prompt_length = len(state.prompt_token_ids)
        self.sampler = Sampler(
            sampling, vocab_size, params.all_stop_token_ids, prompt_length=self.prompt_length
        )
        drafting = settings.drafting.merged(asked.drafting)
        method, budget = drafting.method, drafting.budget
        if planner.policy is None:
            method, budget = unmeasured(method, budget)
        if budget != "auto":
            budget = min(budget, settings.nodes)
        self.request = planner.request(method, budget, drafting.depth, None, not sampling.greedy)
        self.seen = 0
        self.drafted: Nodes | None = None
        self.arm = OFF
        self.fresh = True
        self.ended = False
        self._stops = {params.eos_token_id, *(params.stop_token_ids or ())}

    @property
    def drafts(self) -> bool:
        """Whether anything may be drafted for it."""
        return self.request.method != "off"

    @property
    def left(self) -> int:
        """Tokens that may still be chosen."""
        return self.sampler.params.max_tokens - (len(self.tokens) - self.prompt_length)

    def follow(self, state: Any) -> None:
        """Take over the runner's record where it took tokens back."""
        if len(self.tokens) != state.num_tokens:
            self.tokens = [*state.prompt_token_ids, *state.output_token_ids]
            self.drafted = None

    def append(self, token: int) -> None:
        """Take a chosen token."""
        self.tokens.append(token)
        length = len(self.tokens) - self.prompt_length
        stops = token in self._stops and length >= self.sampler.params.min_tokens
        self.ended = stops or self.left <= 0
