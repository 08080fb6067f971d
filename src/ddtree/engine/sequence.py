"""One prompt and its growing answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ddtree.engine.detokenizer import Detokenizer
from ddtree.policy import Arm, Request
from ddtree.sampling.sampler import Sampler, SamplingParams, TokenLogprobs
from ddtree.stats import Stats

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Sequence:
    """One prompt and its growing answer.

    Attributes:
        tokens: prompt and output together; the last output token is the bonus token of the next round.
        origins: of each output token, the depth at which it was drafted and accepted (1, 2, ...), or 0 for one that the
            target chose after the path, the first token included.
        cached_tokens: prompt tokens whose keys and values came from the prefix store.
        request: how it is drafted for; another may be assigned between steps.
        finish_reason: None while running; "stop" (stop token or string), "length" (token limit or context full),
            "cancelled", or "error", with the exception in `error`.
        logprobs: one entry per output token when the parameters ask for them.
        prompt_logprobs: one entry per prompt token after the first, once it is processed, when they ask for these.
    """

    def __init__(
        self, prompt: list[int], params: SamplingParams, sampler: Sampler, text: Detokenizer | None,
        request: Request,
    ) -> None:  # fmt: skip
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.params = params
        self.sampler = sampler
        self.text = text
        self.request = request
        self.origins: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.stats = Stats(
            method=request.method, drafter="+".join(request.members) or "none", prompt_tokens=len(prompt)
        )
        self._started = time.perf_counter()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def left(self) -> int:
        """Tokens that may still be chosen."""
        return self.params.max_tokens - self.output_length

    @property
    def fresh(self) -> bool:
        """Whether it was in no round yet."""
        return not self.stats.rounds

    @property
    def cached_tokens(self) -> int:
        return self.stats.cached_tokens

    def append(self, token: int) -> None:
        """Take the target's choice as the next token of the answer."""
        self.tokens.append(token)
        self.origins.append(0)
        self.stats.output_tokens += 1

    def verified(self, start: int, arm: Arm, nodes: int, accepted: int) -> None:
        """Note a round: of `nodes` drafted ones, those of `accepted` tokens from `tokens[start]` on were right."""
        at = start - self.prompt_length
        self.origins[at : at + accepted] = range(1, accepted + 1)
        self.stats.rounds += 1
        self.stats.arms[str(arm)] += 1
        self.stats.nodes += nodes
        self.stats.accepted[accepted] += 1

    def began(self) -> None:
        """The first token is there, or will never be."""
        self.stats.ttft = time.perf_counter() - self._started

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self.text is not None:
            self.text.finish()
        self.stats.total = time.perf_counter() - self._started


@dataclass(frozen=True)
class Result:
    """One answer.

    Attributes:
        text: without special tokens and, unless asked for, without the stop string; "" without a tokenizer.
        token_ids: output tokens, a stop token included.
        finish_reason: "stop" (stop token or string), "length" (token limit or context full), or "cancelled".
        logprobs: of the target, one entry per token of `token_ids`; None unless asked for.
        prompt_logprobs: of the prompt's tokens after the first; None unless asked for.
        prompt_ids: the prompt as the target saw it.
        seed: the one used, so that a drawn one can be given again.
        stats: figures; `stats.arms` tells how rounds were really decoded.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    prompt_ids: list[int] = field(repr=False)
    seed: int
    stats: Stats

    @staticmethod
    def of(sequence: Sequence) -> Result:
        """The result of a sequence that has ended."""
        assert sequence.finish_reason is not None and sequence.params.seed is not None
        return Result(
            text="" if sequence.text is None else sequence.text.text,
            token_ids=sequence.output,
            finish_reason=sequence.finish_reason,
            logprobs=sequence.logprobs,
            prompt_logprobs=sequence.prompt_logprobs,
            prompt_ids=sequence.tokens[: sequence.prompt_length],
            seed=sequence.params.seed,
            stats=sequence.stats,
        )

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "logprobs": _as_dicts(self.logprobs),
            "prompt_logprobs": _as_dicts(self.prompt_logprobs),
            "seed": self.seed,
            "stats": self.stats.as_dict(),
        }


def _as_dicts(entries: list[TokenLogprobs] | None) -> list[dict[str, Any]] | None:
    if entries is None:
        return None
    return [
        {"token": one.token, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
        for one in entries
    ]


class Piece(str):
    """Text of a stream that is final; an ordinary string with two attributes.

    Attributes:
        token_ids: the tokens chosen since the last piece. Text may lag behind them: an incomplete character or a
            possible stop string is held back.
        result: the whole answer, on the last piece (whose text may be empty); None before.
    """

    token_ids: list[int]
    result: Result | None

    def __new__(cls, text: str, token_ids: list[int], result: Result | None = None) -> Piece:
        piece = super().__new__(cls, text)
        piece.token_ids = token_ids
        piece.result = result
        return piece


_END = -1
"""What the walk is told when a sequence has ended: no child carries it."""


def emit(sequence: Sequence, logits: Tensor, max_context: int) -> int:
    """Choose the token after `sequence.tokens` from its logits [V] and append it; -1 where that ends the sequence.

    What a processor raises ends its own sequence, with the exception in `error`, and spares those beside it.
    """
    # A processor of a row before this one may have cancelled it.
    if sequence.finish_reason is not None:
        return _END
    try:
        token = sequence.sampler.choose(logits, sequence.tokens, committed=len(sequence.tokens))
        if sequence.logprobs is not None:
            sequence.logprobs.append(sequence.sampler.logprobs(logits, token))
    except Exception as error:
        sequence.error = error
        sequence.finish("error")
        return _END
    # A processor may have cancelled the sequence it was called for.
    if sequence.finish_reason is not None:
        return _END
    sequence.append(token)
    reason = _ending(sequence, token, max_context)
    if reason is None:
        return token
    sequence.finish(reason)
    return _END


def chooser(
    sequences: list[Sequence], logits: Tensor, max_context: int
) -> Callable[[list[int], list[int]], list[int]]:
    """What `walk` asks at the nodes of logits [R, N, V]. Its order is the text's: so each choice is emitted."""

    def choose(rows: list[int], nodes: list[int]) -> list[int]:
        return [
            emit(sequences[row], logits[row, node], max_context)
            for row, node in zip(rows, nodes, strict=True)
        ]

    return choose


def _ending(sequence: Sequence, token: int, max_context: int) -> FinishReason | None:
    params, length = sequence.params, sequence.output_length
    stops = token in sequence.sampler.stop_ids and length >= params.min_tokens
    stopped = sequence.text is not None and sequence.text.push(token, visible=not stops)
    if stops or stopped:
        return "stop"
    if length >= params.max_tokens or len(sequence.tokens) >= max_context:
        return "length"
    return None
