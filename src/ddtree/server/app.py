"""The HTTP application: all routes, middleware, error handlers, and the dashboard."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

import ddtree
from ddtree import prompts
from ddtree.errors import DDTreeError
from ddtree.server import http, openai, schemas
from ddtree.server.config import HttpSettings
from ddtree.server.engine_thread import EngineThread
from ddtree.server.handle import DeltaQueue
from ddtree.server.http import ApiError, RequestGuard, invalid_value, json_response
from ddtree.server.metrics import CONTENT_TYPE
from ddtree.server.openai import AppState, State
from ddtree.server.tokens import as_text, encode_chat

STATE_EVERY = 1.0
"""Seconds between two states in the stream of events."""
_REPORTS_KEPT = 64  # round reports that wait for a slow reader
_FIELDS = {
    "/v1/chat/completions": schemas.ChatRequest.model_fields,
    "/v1/completions": schemas.CompletionRequest.model_fields,
    "/tokenize": schemas.TokenizeRequest.model_fields,
    "/api/drafting": schemas.DraftingRequest.model_fields,
}
_DASHBOARD = Path(__file__).parent / "dashboard"
# The page asks nothing of any other host and carries no inline script or style, so its policy forbids both.
_DASHBOARD_HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about: a newer server's page is seen at once
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

# Python 3.11 knows the older type, and systems may know another one.
mimetypes.add_type("text/javascript", ".mjs")
mimetypes.add_type("text/javascript", ".js")
router = APIRouter()


class DashboardFiles(StaticFiles):
    """Serves the dashboard's files, with headers that forbid scripts and requests of other hosts."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return a file, or 304 for a browser that has it."""
        response = super().file_response(*args, **options)
        response.headers.update(_DASHBOARD_HEADERS)
        return response


def create_app(worker: EngineThread, settings: HttpSettings | None = None) -> FastAPI:
    """Return an ASGI application on an engine thread, which its owner starts and shuts down."""
    settings = settings or HttpSettings()
    app = FastAPI(
        title="ddtree",
        version=ddtree.__version__,
        # The pages that show the API load scripts of other hosts.
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": schemas.ErrorBody}, "5XX": {"model": schemas.ErrorBody}},
    )
    defaults = worker.model.defaults if settings.model_sampling else {}
    app.state.ddtree = AppState(worker, defaults)
    app.include_router(openai.router)
    app.include_router(router)
    app.mount("/dashboard", DashboardFiles(directory=_DASHBOARD))
    # The last one added sees a request first.
    limit = worker.limits.max_body
    app.add_middleware(RequestGuard, keys=settings.api_keys, hosts=settings.hosts, limit=limit)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    for kind in (RequestValidationError, HTTPException, DDTreeError, Exception):
        app.add_exception_handler(kind, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, RequestValidationError):
        known = http.validation_error(error)
    elif not isinstance(error, HTTPException) or isinstance(error, ApiError):
        known = http.api_error(error, _FIELDS.get(path, {}))
    # What is left are FastAPI's own.
    elif error.detail == "There was an error parsing the body":
        known = ApiError(400, "the body is no JSON: its encoding or its depth is wrong", code="invalid_json")
    elif error.status_code == 404:
        known = ApiError(404, f"there is nothing at {path}: the API is under /v1", code="not_found")
    else:
        known = ApiError(error.status_code, str(error.detail), headers=error.headers)
    return known.response()


@router.get("/v1/models")
async def models(state: State) -> Response:
    """Return the one model."""
    return json_response({"object": "list", "data": [_model_card(state)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> Response:
    """Return the model by its name, or 404."""
    state.check_model(name)
    return json_response(_model_card(state))


def _model_card(state: AppState) -> dict[str, Any]:
    return {
        "id": state.worker.name,
        "object": "model",
        "created": state.created,
        "owned_by": "ddtree",
        "root": state.worker.name,
        "parent": None,
        "max_model_len": state.worker.model.target.max_context,
    }


@router.get("/version")
async def version() -> Response:
    """Return the version of this program."""
    return json_response({"version": ddtree.__version__})


@router.get("/health")
@router.get("/health/live")
@router.head("/health", include_in_schema=False)
@router.head("/health/live", include_in_schema=False)
async def live(state: State) -> Response:
    """Return 200 while the engine can decode, or is about to."""
    health = state.worker.health
    return json_response(health, 200 if health["live"] else 503)


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def ready(state: State) -> Response:
    """Return 200 while answers are made."""
    health = state.worker.health
    return json_response(health, 200 if health["ready"] else 503)


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(state: State) -> Response:
    """Return figures for Prometheus."""
    return Response(state.worker.book.metrics.text(), media_type=CONTENT_TYPE)


@router.post("/tokenize")
async def tokenize(body: schemas.TokenizeRequest, state: State) -> Response:
    """Return the token ids of a text or a chat, as an answer would begin with."""
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt", "give either prompt or messages")
    model = state.worker.model
    tokens = await state.run_in_thread(lambda: _encode(model.tokenizer, body))
    found = {"count": len(tokens), "max_model_len": model.target.max_context, "tokens": tokens}
    if body.return_token_strs:
        texts = state.worker.texts
        found["token_strs"] = await state.run_in_thread(lambda: [texts(token)[0] for token in tokens])
    return json_response(found)


def _encode(tokenizer: Any, body: schemas.TokenizeRequest) -> list[int]:
    if body.prompt is None:
        return encode_chat(tokenizer, body)
    tokens = prompts.encode(tokenizer, body.prompt)
    if body.add_special_tokens is False:
        return [int(token) for token in tokenizer.encode(body.prompt, add_special_tokens=False)]
    return tokens


@router.post("/detokenize")
async def detokenize(body: schemas.DetokenizeRequest, state: State) -> Response:
    """Return the text of token ids, special ones included."""
    state.check_model(body.model)
    tokenizer, size = state.worker.model.tokenizer, state.worker.model.target.vocab_size
    if tokenizer is None:
        raise ApiError(400, "the model has no tokenizer", code="unsupported_parameter")
    bad = next((token for token in body.tokens if not 0 <= token < size), None)
    if bad is not None:
        raise invalid_value("tokens", f"tokens: {bad} is outside the vocabulary 0..{size - 1}")
    return json_response({"prompt": await state.run_in_thread(lambda: as_text(tokenizer, body.tokens))})


@router.get("/api/drafting")
async def drafting(state: State) -> Response:
    """Return how answers are drafted where their requests do not say."""
    return json_response(asdict(state.worker.drafting))


@router.post("/api/drafting")
async def set_drafting(body: schemas.DraftingRequest, state: State) -> Response:
    """Change that from the next round on, for running answers too. Texts stay the same."""
    # Null is a value: all drafters. An unknown field is an error here, as a misspelt one would change nothing.
    changed = state.worker.drafting.merged(body.model_dump(exclude_unset=True))
    state.worker.set_drafting(changed)
    return json_response(asdict(changed))


@router.get("/api/state")
async def state(state: State) -> Response:
    """Return what the server is doing."""
    return json_response(state.worker.state())


@router.get("/api/events", responses=http.STREAM_RESPONSES)
async def events(state: State) -> Response:
    """Send server-sent events: `round` reports as they come, and the `state` once per second."""
    reports: DeltaQueue[dict[str, Any]] = DeltaQueue(most=_REPORTS_KEPT)
    return http.EventStream(_events(state.worker, reports), state.worker.book.watch(reports.put))


async def _events(worker: EngineThread, reports: DeltaQueue[dict[str, Any]]) -> AsyncGenerator[str, None]:
    """Yield events until the engine's thread ends, which would otherwise wait for its readers."""
    clock = asyncio.get_running_loop().time
    due = clock()
    while worker.health["status"] not in ("closing", "stopped", "failed"):
        if clock() >= due:
            yield http.event(worker.state(), "state")
            due = clock() + STATE_EVERY
        for report in await reports.take(due - clock()):
            yield http.event(report, "round")


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def dashboard(request: Request) -> Response:
    """Return the dashboard's page."""
    return await DashboardFiles(directory=_DASHBOARD).get_response("index.html", request.scope)
