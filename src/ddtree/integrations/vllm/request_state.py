"""Requests as the worker sees them: their text, how they are sampled, and the walk down their tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddtree.engine.planner import Planner, unmeasured
from ddtree.errors import DDTreeError
from ddtree.integrations.vllm.settings import (
    PluginSettings,
    RequestFields,
    sampling_params,
)
from ddtree.integrations.vllm.trees import StepRow
from ddtree.policy import OFF
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler
from ddtree.tree import DraftTree, walk

PADDING = -1
"""Stands for no token in what vLLM's sampler returns."""


class RequestState:
    """A request from its first step until it is finished.

    Args:
        name: the engine's id of it.
        state: vLLM's record of it, a `CachedRequestState`.
        settings: of the worker.
        vocab_size: width of the logits.
        planner: limits what the request asks of drafting to what can be had.

    Attributes:
        tokens: prompt and output; the last one chosen is not yet in the cache.
        request: how it is drafted for.
        observed: tokens whose features the drafter has, or cannot have.
        missing: how many of the first tokens have no features.
        features: of a prompt that is not through, in parts [n, F * H].
        drafted: the tree that the scheduler was sent last, one row; None where nothing was drafted.
        arm: how that tree was drafted.
        fresh: nothing was planned for it yet.

    Raises:
        ConfigError: the request asks for what is not supported; the front end refuses such requests.
    """

    def __init__(
        self, name: str, state: Any, settings: PluginSettings, vocab_size: int, planner: Planner
    ) -> None:
        params = state.sampling_params
        fields = RequestFields.read(params.extra_args)
        sampling = within_vocabulary(sampling_params(params, fields), vocab_size)
        self.name = name
        self.tokens: list[int] = [*state.prompt_token_ids, *state.output_token_ids]
        self.prompt_length = len(state.prompt_token_ids)
        self.sampler = Sampler(
            sampling, vocab_size, params.all_stop_token_ids, prompt_length=self.prompt_length
        )
        drafting = settings.drafting.merged(fields.drafting)
        method, budget = drafting.method, drafting.budget
        if planner.policy is None:
            method, budget = unmeasured(method, budget)
        if budget != "auto":
            budget = min(budget, settings.nodes)
        self.request = planner.request(method, budget, drafting.depth, None, not sampling.greedy)
        self.observed = 0
        self.missing = 0
        self.features: list[Tensor] = []
        self.drafted: DraftTree | None = None
        self.arm = OFF
        self.fresh = True
        self._stops = {params.eos_token_id, *(params.stop_token_ids or ())}

    @property
    def drafts(self) -> bool:
        """Return whether anything may be drafted for it."""
        return self.request.method != "off"

    @property
    def left(self) -> int:
        """Return how many tokens may still be chosen."""
        return self.sampler.params.max_tokens - (len(self.tokens) - self.prompt_length)

    def synchronize(self, state: Any) -> None:
        """Take over the text of vLLM's record where the engine took tokens back."""
        if len(self.tokens) != state.num_tokens:
            self.tokens = [*state.prompt_token_ids, *state.output_token_ids]
            self.drafted = None

    def ended(self, tokens: list[int]) -> bool:
        """Return whether a text of this request, prompt and output, takes no more tokens."""
        length = len(tokens) - self.prompt_length
        params = self.sampler.params
        return length >= params.max_tokens or (tokens[-1] in self._stops and length >= params.min_tokens)

    def choose(self, logits: Tensor, prefix: list[int]) -> int:
        """Return the token after a prefix from raw logits [V]; the likeliest one where the rules allow none."""
        try:
            return self.sampler.choose(logits, prefix, committed=len(self.tokens))
        except DDTreeError:
            # An error would end the engine, and with it every request beside this one.
            return int(logits.float().nan_to_num().argmax())


def within_vocabulary(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return a copy without token ids that the model lacks.

    They have no effect on a text, the front end cannot find them all, and an error in the worker would end the engine.
    """
    return replace(
        sampling,
        logit_bias={token: bias for token, bias in sampling.logit_bias.items() if token < vocab_size},
        bad_words=tuple(word for word in sampling.bad_words if max(word) < vocab_size),
    )


@dataclass(frozen=True)
class Verified:
    """Result of a request's step.

    Attributes:
        path: accepted nodes, the root first.
        tokens: chosen after each node of the path.
    """

    path: list[int]
    tokens: list[int]


def verify(
    states: Sequence[RequestState], rows: Sequence[StepRow], logits: Tensor, max_length: int
) -> list[Verified]:
    """Follow the target's own choices down each request's tree, and append them to its text.

    Args:
        states: requests, at least one; their texts end with the root.
        rows: their parts in the step.
        logits: raw, [nodes of the step, V].
        max_length: most tokens of a text, prompt and output, e.g. 2048.
    """

    def choose(row: int, node: int, prefix: list[int]) -> int | None:
        # The root's token never ends a text, or there would be no step.
        if node and (len(prefix) >= max_length or states[row].ended(prefix)):
            return None
        return states[row].choose(logits[rows[row].logits + node], prefix)

    trees = DraftTree.stack([row.tree for row in rows])
    paths, tokens = walk(trees, [state.tokens for state in states], choose)
    for state, chosen in zip(states, tokens, strict=True):
        state.tokens += chosen
    # A node whose token ends the text is reached, but nothing is chosen after it.
    return [Verified(path[: len(chosen)], chosen) for path, chosen in zip(paths, tokens, strict=True)]


def sampler_output(
    verified: Sequence[Verified], starts: Sequence[int], logits: Tensor, count: int | None, sampler: Any
) -> tuple[Tensor, Any]:
    """Return chosen tokens and their log-probabilities, as vLLM's sampler does.

    Args:
        verified: of all requests of the batch, in its order.
        starts: place of each request's logits among `logits`.
        logits: raw, [nodes of the step, V].
        count: log-probabilities asked for beside the chosen token's, e.g. 5; None for none.
        sampler: vLLM's.

    Returns:
        int32 [requests, most tokens of one], padded; and vLLM's log-probabilities of as many places, or None.
    """
    width = max(len(row.tokens) for row in verified)
    padded = [row.tokens + [PADDING] * (width - len(row.tokens)) for row in verified]
    tokens = torch.tensor(padded, dtype=torch.int32)
    if count is None:
        return tokens, None
    # vLLM wants log-probabilities of padding as well: those of the root will do.
    nodes = [
        start + node
        for row, start in zip(verified, starts, strict=True)
        for node in row.path + [0] * (width - len(row.path))
    ]
    chosen = logits[torch.tensor(nodes)]
    raw = sampler.logprobs_mode == "raw_logits"
    scores = chosen.float() if raw else sampler.compute_logprobs(chosen)
    return tokens, sampler.gather_logprobs(scores, count, tokens.flatten().clamp(min=0).to(torch.int64))
