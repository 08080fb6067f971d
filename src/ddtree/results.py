"""What a generation gives back: the whole answer, or pieces of it as they become final."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddtree.sampling import TokenLogprobs
from ddtree.sequence import FinishReason, Sequence
from ddtree.stats import Stats


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
