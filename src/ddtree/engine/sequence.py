"""One prompt and its growing answer: what it asked for, its tokens, its text, its end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ddtree.engine.detokenizer import Detokenizer
from ddtree.policy import Arm, Request
from ddtree.sampling.sampler import Sampler, TokenLogprobs, token_logprobs
from ddtree.stats import Stats

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Delta:
    """The part of an answer that is new since the last `Sequence.take_new`.

    Attributes:
        tokens: the tokens chosen since.
        text: the text that has become final since. It may lag behind the tokens: an incomplete character or a
            possible stop string is held back.
        origins: as `Sequence.origins`, of these tokens.
        logprobs: as `Sequence.logprobs`, of these tokens.
    """

    tokens: list[int]
    text: str
    origins: list[int]
    logprobs: list[TokenLogprobs] | None


class Sequence:
    """One prompt and its growing answer.

    Args:
        prompt: token ids.
        sampler: chooses the tokens, by its parameters (with a seed).
        text: makes text of the tokens and finds stop strings; None where only ids are wanted.
        request: how to draft for it.
        max_context: most tokens of prompt and answer together.

    Attributes:
        tokens: prompt and output together; the last output token is the bonus token of the next round.
        origins: of each output token, the depth at which it was drafted and accepted (1, 2, ...), or 0 for a token
            that the target chose after the path, the first token included.
        request: how it is drafted for now; see `redraft`.
        cancelled: it is to end after the tokens chosen so far; set by `Engine.cancel` during a step.
        finish_reason: None while running; "stop" (stop token or string), "length" (token limit or context full),
            "cancelled", or "error", with the exception in `error`.
        logprobs: one entry for each output token when the parameters ask for them.
        prompt_logprobs: one entry for each prompt token after the first, once it is processed, when they ask for
            these.
    """

    def __init__(
        self,
        prompt: list[int],
        sampler: Sampler,
        text: Detokenizer | None,
        request: Request,
        max_context: int,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.params = params = sampler.params
        self.sampler = sampler
        self.text = text
        self.origins: list[int] = []
        self.cancelled = False
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.stats = Stats(prompt_tokens=len(prompt))
        self.redraft(request)
        self._max_output = min(params.max_tokens, max_context - len(prompt))
        self._failure: Exception | None = None
        self._taken = 0
        self._started = time.perf_counter()

    @property
    def output(self) -> list[int]:
        """The tokens of the answer."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """How many tokens the answer has."""
        return len(self.tokens) - self.prompt_length

    @property
    def left(self) -> int:
        """Tokens that may still be chosen, within `max_tokens` and the context."""
        return self._max_output - self.output_length

    @property
    def fresh(self) -> bool:
        """Whether no round has been decoded yet."""
        return not self.stats.rounds

    def redraft(self, request: Request) -> None:
        """Draft as `request` says from the next round on. Call it between steps."""
        self.request = request
        self.stats.method = request.method
        self.stats.drafter = "+".join(request.members) or "none"

    def choose(self, logits: Tensor, prefix: list[int]) -> int | None:
        """Return the target's choice after `prefix`, given its logits [V]; None to choose no further.

        A custom processor may raise, or cancel this sequence. That ends this sequence, at the next `extend`, and spares
        those beside it.
        """
        if self.cancelled or self._failure is not None:
            return None
        try:
            token = self.sampler.choose(logits, prefix, committed=len(self.tokens))
        except Exception as error:
            self._failure = error
            return None
        return None if self.cancelled else token

    def extend(self, tokens: Iterable[int], logits: Iterable[Tensor]) -> int:
        """Append chosen tokens up to the one that ends the answer, make text of them, and end where they do.

        Args:
            tokens: as chosen, in order. What follows a stop token, a stop string or the limit is left out, and so is
                an exception that a processor raised after it.
            logits: [V] of each token.

        Returns:
            How many tokens were appended.
        """
        count = 0
        for token, own in zip(tokens, logits, strict=False):
            if self.logprobs is not None:
                self.logprobs.append(token_logprobs(own, token, self.params.logprobs or 0))
            self.tokens.append(token)
            self.origins.append(0)
            self.stats.output_tokens += 1
            count += 1
            if reason := self._ending(token):
                self.finish(reason)
                return count
        if self._failure is not None:
            self.error = self._failure
            self.finish("error")
        elif self.cancelled:
            self.finish("cancelled")
        return count

    def take_new(self) -> Delta:
        """Return what is new since the last call. Each part of the answer is given out once."""
        start, self._taken = self._taken, self.output_length
        return Delta(
            self.tokens[self.prompt_length + start :],
            "" if self.text is None else self.text.take(),
            self.origins[start:],
            None if self.logprobs is None else self.logprobs[start:],
        )

    def count_round(self, arm: Arm, nodes: int, accepted: int, chosen: int) -> None:
        """Count a round of `nodes` drafted nodes, where the last `chosen` tokens begin with `accepted` drafted ones."""
        at = len(self.origins) - chosen
        self.origins[at : at + accepted] = range(1, accepted + 1)
        self.stats.rounds += 1
        self.stats.arms[str(arm)] += 1
        self.stats.nodes += nodes
        self.stats.accepted[accepted] += 1

    def began(self) -> None:
        """Note the time of the first token, or of the failure in its place."""
        self.stats.ttft = time.perf_counter() - self._started

    def finish(self, reason: FinishReason) -> None:
        """End the answer: all its text becomes final, and may turn out to hold a stop string at its end."""
        self.finish_reason = reason
        if self.text is not None:
            self.text.finish()
            if reason == "length" and self.text.stop_string is not None:
                self.finish_reason = "stop"
        self.stats.total = time.perf_counter() - self._started

    def _ending(self, token: int) -> FinishReason | None:
        """Make text of the token just appended; return the reason to end after it, or None."""
        stops = token in self.sampler.stop_ids and self.output_length >= self.params.min_tokens
        stopped = self.text is not None and self.text.push(token, visible=not stops)
        if stops or stopped:
            return "stop"
        return "length" if self.left <= 0 else None


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
        """Make the result of a sequence that has ended."""
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
        """Return the same as plain JSON values."""
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

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments of a copy, for `copy` and `pickle`."""
        return str(self), self.token_ids, self.result
