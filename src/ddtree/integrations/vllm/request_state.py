"""Requests as the worker sees them: their text, how they are sampled, their tree in a step, and the walk down it.

vLLM's scheduler sends a tree as a flat list of tokens; the worker keeps its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddtree.engine.planner import Planner
from ddtree.errors import DDTreeError
from ddtree.integrations.vllm.settings import PluginSettings, RequestFields, sampling_params
from ddtree.policy import OFF
from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler
from ddtree.tree import DraftTree, walk

PADDING = -1
"""Stands for no token in what vLLM's sampler returns."""


def chain(tokens: Sequence[int]) -> DraftTree:
    """Return one row with a single path of tokens, e.g. [5, 6, 7]; the root's token comes first."""
    depths = torch.arange(len(tokens))[None]
    return DraftTree(
        torch.tensor([list(tokens)]), (depths - 1).clamp(min=0), depths, -depths.float(), [len(tokens)]
    )


def as_scheduled(tree: DraftTree | None, root: int, drafted: Sequence[int]) -> DraftTree:
    """Return the tree of the tokens that the scheduler sent for a request.

    Args:
        tree: one row, as it was drafted for the request; None where nothing was.
        root: the request's last token.
        drafted: what the scheduler sent. It may cut the list of a tree, which leaves a smaller tree, since parents come
            before their children.

    Returns:
        The drafted tree, cut as the list is; a chain where the list is not the drafted one.
    """
    tokens = [root, *drafted]
    if tree is not None and tree.tokens[0, : len(tokens)].tolist() == tokens:
        return tree.truncate([len(drafted)])
    return chain(tokens)


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
        budget = drafting.budget if drafting.budget == "auto" else min(drafting.budget, settings.nodes)
        self.request = planner.request(drafting.method, budget, drafting.depth, None, not sampling.greedy)
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
class StepRow:
    """A request's part in a step.

    Attributes:
        state: the request.
        index: place of the request in the batch.
        start: place of the root among the step's tokens; the other nodes follow it.
        logits: place of the root's logits among those of the step; the other nodes' follow.
        base: absolute position of the root, so the number of tokens before it.
        tree: one row; the root alone where nothing was drafted.
    """

    state: RequestState
    index: int
    start: int
    logits: int
    base: int
    tree: DraftTree

    @property
    def size(self) -> int:
        """Return the number of nodes, root included."""
        return self.tree.sizes[0]

    @property
    def branched(self) -> bool:
        """Return whether the tree is no single path: causal attention and linear positions serve a path."""
        return int(self.tree.depths.max()) + 1 < self.size


@dataclass(frozen=True)
class Verified:
    """Result of a request's step.

    Attributes:
        path: accepted nodes, the root first.
        tokens: chosen after each node of the path.
    """

    path: list[int]
    tokens: list[int]


def verify(rows: Sequence[StepRow], logits: Tensor, max_length: int) -> dict[str, Verified]:
    """Follow the target's own choices down each request's tree, and append them to its text.

    Args:
        rows: parts of requests in the step, at least one; their texts end with the root.
        logits: raw, [nodes of the step, V].
        max_length: most tokens of a text, prompt and output, e.g. 2048.

    Returns:
        The results by name of the request.
    """

    def choose(place: int, node: int, prefix: list[int]) -> int | None:
        row = rows[place]
        # The root's token never ends a text, or there would be no step.
        if node and (len(prefix) >= max_length or row.state.ended(prefix)):
            return None
        return row.state.choose(logits[row.logits + node], prefix)

    trees = DraftTree.stack([row.tree for row in rows])
    paths, tokens = walk(trees, [row.state.tokens for row in rows], choose)
    verified = {}
    for row, path, chosen in zip(rows, paths, tokens, strict=True):
        row.state.tokens += chosen
        # A node whose token ends the text is reached, but nothing is chosen after it.
        verified[row.state.name] = Verified(path[: len(chosen)], chosen)
    return verified


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
