"""The HTTP application: routes, middleware, and how errors are told."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import ddtree
from ddtree.errors import DDTreeError
from ddtree.server import admin, chat, completions, pages, system
from ddtree.server.http import ApiError, api_error, validation_error
from ddtree.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DraftingRequest,
    ErrorBody,
    TokenizeRequest,
)
from ddtree.server.security import BodyLimit, Gate
from ddtree.server.state import Serving, Settings
from ddtree.server.worker import Service

_SCHEMAS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/api/drafting": DraftingRequest,
}


def create_app(service: Service, settings: Settings | None = None) -> FastAPI:
    """An ASGI application on a service, which its owner starts and shuts down."""
    settings = settings or Settings()
    app = FastAPI(
        title="ddtree",
        version=ddtree.__version__,
        # The pages that show the API load scripts of other hosts.
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.serving = Serving(service, settings)
    for module in (chat, completions, system, admin, pages):
        app.include_router(module.router)
    # The last one added sees a request first.
    app.add_middleware(BodyLimit, limit=service.limits.max_body_bytes)
    app.add_middleware(Gate, keys=settings.api_keys, hosts=settings.hosts)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(DDTreeError, _failed)
    app.add_exception_handler(Exception, _failed)
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return validation_error(error).response()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == "There was an error parsing the body":
        error = ApiError(400, "the body is no JSON: its encoding or its depth is wrong", code="invalid_json")
    if error.status_code == 404 and error.detail == "Not Found":
        error = ApiError(
            404, f"there is nothing at {request.url.path}: the API is under /v1", code="not_found"
        )
    if not isinstance(error, ApiError):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    return error.response()


async def _failed(request: Request, error: Exception) -> Response:
    schema = _SCHEMAS.get(request.url.path)
    return api_error(error, schema.model_fields if schema else None).response()
