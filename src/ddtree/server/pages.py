"""The dashboard's files over HTTP: `/`, and what it names under `dashboard/`.

The page asks nothing of any other host and carries no inline script or style, so that its policy can forbid both.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import HTTPException

PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about: a newer server's page is seen at once
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
def page(request: Request) -> Response:
    """The dashboard."""
    return _answer(request, PAGE)


@router.api_route("/dashboard/{name}", methods=["GET", "HEAD"])
def asset(request: Request, name: str) -> Response:
    """A script, style sheet or picture of the dashboard; 404 for any other name."""
    return _answer(request, name)


@cache
def contents() -> dict[str, tuple[bytes, str, str]]:
    """Each file's bytes, type and entity tag, by name; read once."""
    found = {}
    for file in files(__package__).joinpath("dashboard").iterdir():
        kind = TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            found[file.name] = (data, kind, f'"{hashlib.sha256(data).hexdigest()[:20]}"')
    return found


def _answer(request: Request, name: str) -> Response:
    file = contents().get(name)
    if file is None:
        raise HTTPException(404, f"the dashboard has no file {name!r}")
    data, kind, tag = file
    headers = {**HEADERS, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)
