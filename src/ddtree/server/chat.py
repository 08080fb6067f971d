"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ddtree.server import parameters
from ddtree.server.answers import Answer
from ddtree.server.asking import ask, check
from ddtree.server.events import Event
from ddtree.server.http import ApiError
from ddtree.server.logprobs import of_chat
from ddtree.server.messages import encode_chat
from ddtree.server.openai import Reply, answer
from ddtree.server.schemas import ChatRequest
from ddtree.server.sse import DESCRIBED
from ddtree.server.state import Serving

router = APIRouter()


@router.post("/v1/chat/completions", responses=DESCRIBED)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat: n choices, whole or as server-sent events."""
    serving = Serving.of(request)
    check(serving, body)
    tokenizer = serving.service.model.tokenizer
    params = parameters.sampling_params(
        body,
        serving.defaults,
        tokenizer,
        max_tokens=serving.service.limits.max_tokens,
        logprobs=_logprobs(body),
    )
    prompt = await serving.away(lambda: encode_chat(tokenizer, body))
    answers = ask(serving, body, [prompt], params)
    return await answer(request, ChatReply(serving, body, answers), bool(body.stream))


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    if not body.logprobs:
        return None
    return parameters.checked_logprobs(body.top_logprobs or 0, "top_logprobs")


class ChatReply(Reply):
    """A chat's choices in OpenAI's form."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": of_chat(answer.logprobs, self.serving.tokens) if answer.logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": {"content": event.text}, "finish_reason": None}
        if event.logprobs is not None:
            choice["logprobs"] = of_chat(event.logprobs, self.serving.tokens)
        return choice

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "finish_reason": reason}
