"""`/v1/chat/completions` and `/v1/completions`: from a request to its choices, and from these to the response."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response

from ddtree import prompts
from ddtree.engine.sequence import Result
from ddtree.errors import ConfigError
from ddtree.sampling.params import SamplingParams
from ddtree.server import http, schemas
from ddtree.server.engine_thread import EngineThread
from ddtree.server.handle import ClosingError, DeltaQueue, GenerationRequest, TokenDelta
from ddtree.server.http import ApiError, invalid_value
from ddtree.server.schemas import ChatRequest, CompletionRequest, GenerationFields, StreamOptions
from ddtree.server.tokens import CompletionLogprobs, as_text, chat_logprobs, encode_chat, prompt_logprobs

COMPLETION_TOKENS = 16
"""Tokens of a completion whose request names no limit: OpenAI's default."""
_CLIENT_LEFT = 499
"""The status for a client that has closed the connection, as nginx logs it."""
_log = logging.getLogger(__name__)
router = APIRouter()
T = TypeVar("T")


class AppState:
    """The engine's thread behind one application, and what the handlers of all requests need besides.

    Args:
        worker: makes the answers.
        sampling_defaults: fields of `SamplingParams` for requests that leave them out.

    Attributes:
        created: Unix time at which the application was made, in seconds.
    """

    def __init__(self, worker: EngineThread, sampling_defaults: dict[str, Any]) -> None:
        self.worker = worker
        self.sampling_defaults = sampling_defaults
        self.created = int(time.time())
        # One thread: long texts take a while, and not all tokenizers may be used by several.
        self._executor = ThreadPoolExecutor(1, "ddtree-encode")

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs beside the event loop; one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request asks for another model."""
        if name not in (None, "", self.worker.name):
            message = f"the model {name!r} is not served here: ask for {self.worker.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


def state_of(request: Request) -> AppState:
    """Return the state of a request's application."""
    state: AppState = request.app.state.ddtree
    return state


State = Annotated[AppState, Depends(state_of)]
"""The type of a handler's argument that FastAPI fills with the application's state."""


@router.post("/v1/chat/completions", responses=http.STREAM_RESPONSES)
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    """Answer a chat: n choices, whole or as server-sent events."""
    return await _generate(body, request, state, [body])


@router.post("/v1/completions", responses=http.STREAM_RESPONSES)
async def completions(body: CompletionRequest, request: Request, state: State) -> Response:
    """Continue one prompt or several, n times each; choice i * n + j is the j-th of prompt i."""
    prompt = body.prompt
    if not prompt:
        message = "prompt is empty: give at least one character"
        raise ApiError(400, message, param="prompt", code="invalid_prompt")
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return await _generate(body, request, state, [prompt] if one else list(prompt))


async def _generate(
    body: GenerationFields, request: Request, state: AppState, sources: list[Any]
) -> Response:
    """Answer a request, whose prompts are made of `sources`: a chat, texts, or lists of token ids.

    The answers end when the client leaves.
    """
    check_request(state, body, len(sources))
    worker, tokenizer, chat = state.worker, state.worker.model.tokenizer, isinstance(body, ChatRequest)
    most = worker.limits.max_tokens if chat else COMPLETION_TOKENS
    params = schemas.sampling_params(body, state.sampling_defaults, tokenizer, most)
    encode = encode_chat if chat else prompts.encode
    encoded = await state.run_in_thread(lambda: [encode(tokenizer, source) for source in sources])
    echoes = [""] * len(sources)
    if getattr(body, "echo", None):
        echoes = await state.run_in_thread(lambda: [as_text(tokenizer, source) for source in sources])
    choices = Choices(worker, body, encoded, params)
    formatter = ResponseFormatter(worker, body, choices, echoes)
    if body.stream:
        return http.EventStream(formatter.chunks(), choices.cancel)
    try:
        whole = await http.unless_disconnected(request.receive, formatter.whole())
    finally:
        choices.cancel()
    return Response(status_code=_CLIENT_LEFT) if whole is None else http.json_response(whole)


def check_request(state: AppState, body: GenerationFields, prompts: int) -> None:
    """Raise ApiError for what is wrong with a request of so many prompts, before anything is encoded."""
    worker = state.worker
    state.check_model(body.model)
    schemas.refuse_unsupported(body)
    if body.n is not None and not 1 <= body.n <= worker.limits.max_n:
        raise invalid_value("n", f"n must be from 1 to {worker.limits.max_n}, not {body.n}")
    answers, most = (body.n or 1) * prompts, worker.limits.max_waiting + worker.model.engine.max_rows
    if answers > most:
        message = f"the request asks for {answers} answers: at most {most} fit at once"
        raise ApiError(400, message, code="invalid_value")
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "stream_options needs stream: true")
    try:
        worker.drafting.merged(body.ddtree).check_drafter(worker.model.engine.members)
    except ConfigError as error:
        raise invalid_value("ddtree", str(error)) from error


class Choices:
    """The answers to one HTTP request. They are submitted at once, and must be ended by `cancel` in any case.

    Args:
        worker: makes them.
        body: the request.
        prompts: token ids of each prompt, answered `body.n` times.
        params: how to sample.

    Attributes:
        first_tokens: of each choice, the first token of its prompt.

    Raises:
        DDTreeError: as `EngineThread.submit`.
    """

    def __init__(
        self, worker: EngineThread, body: GenerationFields, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        self._n = body.n or 1
        # One token is made all the same, and not reported.
        self._prompt_only = body.token_limit == 0
        self._prompt_tokens = sum(map(len, prompts))
        self._output_tokens = 0
        requests = [
            GenerationRequest(prompt, one, body.ddtree)
            for prompt in prompts
            for one in schemas.seeded(params, self._n)
        ]
        self.first_tokens = [request.prompt[0] for request in requests]
        self._results: list[Result | None] = [None] * len(requests)
        self._worker = worker
        self._queue: DeltaQueue[tuple[int, TokenDelta]] = DeltaQueue()
        self._handles = worker.submit(requests, self._queue)

    async def deltas(self) -> AsyncIterator[tuple[int, TokenDelta] | None]:
        """Yield (index of the choice, delta) until all have ended; None for 15 seconds without one (keep-alive).

        What a slow client has not taken yet is joined to one delta for each choice.

        Raises:
            Exception: the error that ended an answer early.
        """
        while None in self._results:
            waiting: dict[int, list[TokenDelta]] = {}
            for index, delta in await self._queue.take(http.STREAM_PATIENCE):
                waiting.setdefault(index, []).append(delta)
            if not waiting:
                yield None
            for index, parts in waiting.items():
                yield index, self._received(index, TokenDelta.joined(parts))

    async def complete(self) -> list[TokenDelta]:
        """Return every answer as one delta, once all have ended."""
        parts: list[list[TokenDelta]] = [[] for _ in self._results]
        async for item in self.deltas():
            if item is not None:
                parts[item[0]].append(item[1])
        return [TokenDelta.joined(of_one) for of_one in parts]

    def cancel(self) -> None:
        """End the answers that still run."""
        for handle in self._handles:
            self._worker.cancel(handle)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage so far."""
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": self._prompt_tokens + self._output_tokens,
        }
        cached = [result.stats.cached_tokens if result is not None else 0 for result in self._results]
        # Each prompt counts once, however many answers it has.
        total = sum(max(cached[start : start + self._n]) for start in range(0, len(cached), self._n))
        if total:
            usage["prompt_tokens_details"] = {"cached_tokens": total}
        return usage

    def timings(self, index: int | None = None) -> list[dict[str, Any]]:
        """Return the figures of the answers that have ended, or of one of them."""
        return [
            {"index": at, **_timings(result)}
            for at, result in enumerate(self._results)
            if result is not None and index in (None, at)
        ]

    def _received(self, index: int, delta: TokenDelta) -> TokenDelta:
        if delta.error is not None:
            raise delta.error
        if delta.result is not None and delta.result.finish_reason == "cancelled":
            raise ClosingError("the server shut down before the answer was complete: ask again")
        if self._prompt_only:
            result = delta.result and replace(delta.result, finish_reason="length")
            delta = TokenDelta(prompt_logprobs=delta.prompt_logprobs, result=result)
        self._output_tokens += len(delta.tokens)
        self._results[index] = delta.result
        return delta


def _timings(result: Result) -> dict[str, Any]:
    """Return times in milliseconds, and figures of drafting. `draft_n` and `draft_n_accepted` are llama.cpp's names."""
    stats = result.stats
    return {
        "prompt_n": stats.prompt_tokens,
        "cached_n": stats.cached_tokens,
        "predicted_n": stats.output_tokens,
        "time_to_first_token_ms": 1000 * stats.ttft,
        "time_per_output_token_ms": 1000 * stats.tpot,
        "total_ms": 1000 * stats.total,
        "tokens_per_second": stats.tokens_per_second,
        "rounds": stats.rounds,
        "draft_n": stats.nodes,
        "draft_n_accepted": sum(depth * count for depth, count in stats.accepted.items()),
        "tau": stats.tau,
        "arms": dict(stats.arms),
        "seconds": dict(stats.seconds),
        "seed": result.seed,
    }


class ResponseFormatter:
    """Writes the choices of one request as one JSON body, or as the chunks of a stream.

    Args:
        worker: makes the answers.
        body: the request, of a chat or of completions.
        choices: its answers.
        echoes: of each prompt, the text before its answers; empty for chats.
    """

    def __init__(
        self, worker: EngineThread, body: GenerationFields, choices: Choices, echoes: list[str]
    ) -> None:
        self._texts = worker.texts
        self._choices = choices
        self._chat = isinstance(body, ChatRequest)
        self._options = body.stream_options or StreamOptions()  # type: ignore[call-arg]
        self._detailed = bool(body.ddtree_details)
        self._timed = self._detailed or bool(body.ddtree_timings)
        self._echoes = [echo for echo in echoes for _ in range(body.n or 1)]
        special = getattr(worker.model.tokenizer, "all_special_ids", ())
        hidden = frozenset(() if body.skip_special_tokens is False else special)
        self._logprobs = [CompletionLogprobs(self._texts, len(echo), hidden) for echo in self._echoes]
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind + ".chunk" if self._chat and body.stream else kind,
            "created": int(time.time()),
            "model": worker.name,
        }

    async def whole(self) -> dict[str, Any]:
        """Return the response's JSON, once all answers have ended."""
        answers = enumerate(await self._choices.complete())
        choices = [self._whole_choice(index, answer) for index, answer in answers]
        return {**self._head, "choices": choices, "usage": self._choices.usage(), **self._figures()}

    async def chunks(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events. An error after the first of them is one of them."""
        opened: set[int] = set()
        try:
            async for item in self._choices.deltas():
                if item is None:
                    yield http.STREAM_COMMENT
                    continue
                index, delta = item
                # With the first token, not before: clients take the first chunk for it when they measure.
                if index not in opened and (self._chat or self._echoes[index]):
                    opening = {"role": "assistant", "content": self._echoes[index]}
                    yield self._chunk(index, opening, self._prompt_logprobs(index, delta))
                opened.add(index)
                if delta.text or (delta.tokens and (self._detailed or delta.logprobs)):
                    logprobs = self._answer_logprobs(index, delta)
                    yield self._chunk(index, {"content": delta.text}, logprobs, **self._details(delta))
                if delta.result is not None:
                    # Figures come with the usage where there is one.
                    figures = {} if self._options.include_usage else self._figures(index)
                    yield self._chunk(index, {}, reason=delta.result.finish_reason, **figures)
            if self._options.include_usage:
                yield self._event([], usage=self._choices.usage(), **self._figures())
        except Exception as error:
            known = http.api_error(error)
            if known.status_code == 500:
                _log.exception("an answer failed")
            yield http.event(known.body())
        yield http.STREAM_DONE

    def _whole_choice(self, index: int, answer: TokenDelta) -> dict[str, Any]:
        assert answer.result is not None
        logprobs = self._answer_logprobs(index, answer)
        before = self._prompt_logprobs(index, answer)
        if before and logprobs:
            logprobs = {name: before[name] + logprobs[name] for name in before}
        text = self._echoes[index] + answer.text
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            **({"message": message} if self._chat else {"text": text}),
            "logprobs": logprobs or before,
            "finish_reason": answer.result.finish_reason,
            **self._details(answer),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        **more: Any,
    ) -> str:
        """Return an event of one choice: chats send the delta, completions its text alone."""
        if not self._chat:
            choice = {"index": index, "text": delta.get("content", ""), "logprobs": logprobs}
        elif logprobs is None:
            choice = {"index": index, "delta": delta}
        else:
            choice = {"index": index, "delta": delta, "logprobs": logprobs}
        return self._event([{**choice, "finish_reason": reason}], **more)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        if self._options.continuous_usage_stats:
            more.setdefault("usage", self._choices.usage())
        return http.event({**self._head, "choices": choices, **more})

    def _prompt_logprobs(self, index: int, delta: TokenDelta) -> dict[str, Any] | None:
        if delta.prompt_logprobs is None:
            return None
        return prompt_logprobs(self._choices.first_tokens[index], delta.prompt_logprobs, self._texts)

    def _answer_logprobs(self, index: int, delta: TokenDelta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        if self._chat:
            return chat_logprobs(delta.logprobs, self._texts)
        return self._logprobs[index](delta.logprobs)

    def _details(self, delta: TokenDelta) -> dict[str, Any]:
        if not self._detailed:
            return {}
        texts = [self._texts(token)[0] for token in delta.tokens]
        return {"ddtree": {"origins": delta.origins, "tokens": delta.tokens, "texts": texts}}

    def _figures(self, index: int | None = None) -> dict[str, Any]:
        return {"ddtree": {"timings": self._choices.timings(index)}} if self._timed else {}
