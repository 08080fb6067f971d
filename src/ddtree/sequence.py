"""One prompt and its growing answer."""

from __future__ import annotations

import time
from typing import Literal

from ddtree.policy import Arm, Request
from ddtree.sampling import Sampler, SamplingParams, TokenLogprobs
from ddtree.stats import Stats
from ddtree.text import Detokenizer

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
