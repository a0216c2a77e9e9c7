"""The page at `/`: a playground and a live view, static files of server/page/.

The files are read once, when their route is made, and only they are served: no path of a client reaches the file system.
They are open without a key; the page asks for one and sends it like any other client.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class PageFile(NamedTuple):
    """One file, ready to be sent."""

    content: bytes
    headers: dict[str, str]


def find_files() -> dict[str, Path]:
    """Return every file of the page by its URL path; the HTML is `/`."""
    return {
        "/" if path.name == "index.html" else f"/page/{path.relative_to(FOLDER).as_posix()}": path
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in MEDIA_TYPES
    }


def _load(path: Path) -> PageFile:
    content = path.read_bytes()
    headers = {
        "content-type": MEDIA_TYPES[path.suffix],
        "etag": f'"{sha256(content).hexdigest()[:20]}"',
        "cache-control": "no-cache",  # revalidated each time, so that an update is seen
    }
    return PageFile(content, SECURITY_HEADERS | headers)


def page_router(paths: Mapping[str, Path]) -> APIRouter:
    """Return the route of these files: one for all, since each route of FastAPI lengthens the start."""
    router, files = APIRouter(), {url: _load(path) for url, path in paths.items()}

    @router.get("/", include_in_schema=False)
    @router.get("/page/{name:path}", include_in_schema=False)
    async def send(request: Request) -> Response:
        file = files.get(request.scope["path"])
        if file is None:
            raise HTTPException(404)
        if request.headers.get("if-none-match") == file.headers["etag"]:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)

    return router
