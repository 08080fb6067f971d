"""What is told of the server itself: its model, health, figures, version; and its tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

import ddtree
from ddtree import prompts
from ddtree.server.http import ApiError, json_response
from ddtree.server.messages import encode_chat
from ddtree.server.metrics import CONTENT_TYPE
from ddtree.server.schemas import DetokenizeRequest, TokenizeRequest
from ddtree.server.state import Serving

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_card(Serving.of(request))]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """The model by its name, or 404."""
    serving = Serving.of(request)
    serving.check_model(name)
    return json_response(_card(serving))


@router.get("/version")
async def version() -> Response:
    """Of this program."""
    return json_response({"version": ddtree.__version__})


@router.get("/health")
@router.get("/health/live")
@router.head("/health", include_in_schema=False)
@router.head("/health/live", include_in_schema=False)
async def live(request: Request) -> Response:
    """200 while the engine can decode, or is about to."""
    health = Serving.of(request).service.health
    return json_response(health, 200 if health["live"] else 503)


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 while answers are being made."""
    health = Serving.of(request).service.health
    return json_response(health, 200 if health["ready"] else 503)


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(Serving.of(request).service.metrics.text(), media_type=CONTENT_TYPE)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or a chat, as an answer would begin with."""
    serving = Serving.of(request)
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
    return await serving.away(lambda: json_response(_tokenized(serving, body)))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special ones included."""
    serving = Serving.of(request)
    serving.check_model(body.model)
    tokenizer, vocabulary = serving.service.model.tokenizer, serving.service.model.target.vocab_size
    if tokenizer is None:
        raise ApiError(400, "the model has no tokenizer", code="unsupported_parameter")
    bad = next((token for token in body.tokens if not 0 <= token < vocabulary), None)
    if bad is not None:
        message = f"tokens: {bad} is outside the vocabulary 0..{vocabulary - 1}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return await serving.away(lambda: json_response({"prompt": _decode(tokenizer, body.tokens)}))


def _tokenized(serving: Serving, body: TokenizeRequest) -> dict[str, Any]:
    tokens = _encode(serving.service.model.tokenizer, body)
    found: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": serving.service.model.target.max_context,
        "tokens": tokens,
    }
    if body.return_token_strs:
        found["token_strs"] = [serving.tokens(token)[0] for token in tokens]
    return found


def _encode(tokenizer: Any, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        return encode_chat(tokenizer, body)
    tokens = prompts.encode(tokenizer, body.prompt)
    if body.add_special_tokens is False:
        return [int(token) for token in tokenizer.encode(body.prompt, add_special_tokens=False)]
    return tokens


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _card(serving: Serving) -> dict[str, Any]:
    name = serving.service.name
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "ddtree",
        "root": name,
        "parent": None,
        "max_model_len": serving.service.model.target.max_context,
    }
