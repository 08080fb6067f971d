"""`/v1/completions`: text that goes on, without a chat template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ddtree import prompts
from ddtree.server import parameters
from ddtree.server.answers import Answer, Answers
from ddtree.server.asking import ask, check
from ddtree.server.events import Event
from ddtree.server.http import ApiError
from ddtree.server.logprobs import CompletionLogprobs, joined, of_prompt
from ddtree.server.openai import Reply, answer
from ddtree.server.schemas import CompletionRequest
from ddtree.server.sse import DESCRIBED
from ddtree.server.state import Serving

MAX_TOKENS = 16
"""Tokens of an answer where the request says nothing: OpenAI's."""

router = APIRouter()


@router.post("/v1/completions", responses=DESCRIBED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several, n times each; choice i * n + j is the j-th of prompt i."""
    serving = Serving.of(request)
    given = _prompts(body)
    check(serving, body, len(given))
    tokenizer = serving.service.model.tokenizer
    logprobs = (
        body.logprobs if body.logprobs is None else parameters.checked_logprobs(body.logprobs, "logprobs")
    )
    params = parameters.sampling_params(
        body,
        serving.defaults,
        tokenizer,
        max_tokens=MAX_TOKENS,
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.echo else None,
        prompt_only=bool(body.echo),
    )
    encoded = await serving.away(lambda: [prompts.encode(tokenizer, prompt) for prompt in given])
    echoes = [""] * len(given)
    if body.echo:
        echoes = await serving.away(lambda: [_text(tokenizer, prompt) for prompt in given])
    answers = ask(serving, body, encoded, params, silent=parameters.asked_tokens(body, least=0) == 0)
    n = len(answers.answers) // len(given)
    before = [(echo, prompt[0]) for echo, prompt in zip(echoes, encoded, strict=True) for _ in range(n)]
    reply = CompletionReply(serving, body, answers, before)
    return await answer(request, reply, bool(body.stream))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Each prompt of a request. Raises ApiError for an empty list."""
    prompt = body.prompt
    if not prompt:
        raise ApiError(
            400, "prompt is empty: give at least one character", param="prompt", code="invalid_prompt"
        )
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _text(tokenizer: Any, prompt: str | list[int]) -> str:
    """A prompt as text, for `echo`."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        return ""
    return str(tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class CompletionReply(Reply):
    """Continuations in OpenAI's older form.

    Args:
        before: what stands before each answer, and the first token of its prompt.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        serving: Serving,
        body: CompletionRequest,
        answers: Answers,
        before: list[tuple[str, int]],
    ) -> None:
        super().__init__(serving, body, answers)
        self._before = before
        special = getattr(serving.service.model.tokenizer, "all_special_ids", ())
        hidden = frozenset(() if body.skip_special_tokens is False else special)
        self._logprobs = [CompletionLogprobs(serving.tokens, len(echo), hidden) for echo, _ in before]

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._before[index][0] + answer.text,
            "logprobs": joined(
                [
                    self._of_prompt(index, answer),
                    self._logprobs[index](answer.logprobs) if answer.logprobs else None,
                ]
            ),
            "finish_reason": answer.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        echo, _ = self._before[index]
        logprobs = self._of_prompt(index, self.answers.answers[index])
        return {"index": index, "text": echo, "logprobs": logprobs, "finish_reason": None} if echo else None

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        logprobs = None if event.logprobs is None else self._logprobs[index](event.logprobs)
        return {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": None}

    def _of_prompt(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Log-probabilities of the tokens that are echoed, if they are asked for."""
        if answer.prompt_logprobs is None:
            return None
        return of_prompt(self._before[index][1], answer.prompt_logprobs, self.serving.tokens)

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
