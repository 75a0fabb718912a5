"""Web pages for a browser without internet access. They load only installed files; their data come from the REST API."""

from __future__ import annotations

import gzip
from enum import StrEnum
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import xxhash
from fastapi import APIRouter, Header
from fastapi.responses import FileResponse, Response

from ratchet_contract.errors import NotFound
from ratchet_service.api.authentication import OPEN

router = APIRouter(include_in_schema=False)
_WEB: Final = (Path(__file__).parents[2] / "web").resolve()
_BUNDLE: Final = "fastapi_offline"
"""The package that contains Swagger UI as files. None of its Python code is used."""
_COMMON: Final = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_POLICY: Final = f"default-src 'self'; {_COMMON}"
_SWAGGER_POLICY: Final = (
    f"default-src 'none'; connect-src 'self'; {_COMMON}; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:"
)
"""The policy of Swagger UI's page. Swagger UI sets style attributes, so inline styles are allowed."""
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Browsers must ask each time whether a file has changed."""
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _File(NamedTuple):
    """A file of the pages. ``etag``: changes with the content."""

    content: bytes
    packed: bytes
    etag: str


@lru_cache(maxsize=256)
def _load(path: Path, modified_ns: int) -> _File:
    """Return the file, read and compressed once per change of it."""
    content = path.read_bytes()
    return _File(content, gzip.compress(content, 9, mtime=0), f'"{xxhash.xxh3_64_hexdigest(content)}"')


@router.get("/", dependencies=[OPEN])
def index(
    accept_encoding: Annotated[str, Header()] = "", if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Return the page that all addresses of the web pages have in common: they differ only behind the ``#``."""
    return _file("index.html", accept_encoding, if_none_match)


@router.get("/web/{path:path}", dependencies=[OPEN])
def file(
    path: str,
    accept_encoding: Annotated[str, Header()] = "",
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Return a file that the pages load. Raises ``NotFound`` if there is none."""
    return _file(path, accept_encoding, if_none_match)


def _file(name: str, accept_encoding: str, if_none_match: str | None) -> Response:
    """Return the file ``name`` below the directory of the pages, compressed if the browser accepts that; 304 if it has it.
    Raises ``NotFound`` (``file-not-found``)."""
    try:
        path = (_WEB / name).resolve()
        exists = path.is_relative_to(_WEB) and path.suffix in _TYPES and path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a null character
        exists = False
    if not exists:
        raise NotFound(f"the web pages have no file {name!r}", code="file-not-found")
    found = _load(path, path.stat().st_mtime_ns)
    headers = {**_HEADERS, "Content-Security-Policy": _POLICY, "ETag": found.etag, "Vary": "Accept-Encoding"}
    if found.etag in (if_none_match or ""):
        return Response(status_code=304, headers=headers)
    packed = "gzip" in accept_encoding and "gzip;q=0" not in accept_encoding.replace(" ", "")
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(found.packed if packed else found.content, headers=headers, media_type=_TYPES[path.suffix])


class DocsFile(StrEnum):
    START = "docs.js"
    SCRIPT = "swagger-ui-bundle.js"
    STYLE = "swagger-ui.css"


@router.get("/docs", dependencies=[OPEN])
def docs() -> Response:
    """Return the page of Swagger UI, which shows ``/openapi.json``."""
    return _page(_WEB / "docs.html", _SWAGGER_POLICY)


@router.get("/docs/{name}", dependencies=[OPEN])
def docs_file(name: DocsFile) -> Response:
    """Return one file that the page of Swagger UI loads. Raises ``NotFound`` if the package with it is not installed."""
    return _page(_WEB / name if name is DocsFile.START else _bundled(name), _SWAGGER_POLICY)


def _bundled(name: str) -> Path:
    """Return the path of a file of Swagger UI. Raises ``NotFound`` (``file-not-found``) if the package with it is not
    installed."""
    found = find_spec(_BUNDLE)
    if found is None or found.origin is None:
        raise NotFound(
            f"this installation lacks the package {_BUNDLE}, which has this page's files: pip install 'ratchet-train[service]'",
            code="file-not-found",
        )
    return Path(found.origin).with_name("static") / name


def _page(path: Path, policy: str) -> Response:
    """Return the file as a response with ``policy`` as its Content-Security-Policy."""
    return FileResponse(path, headers={**_HEADERS, "Content-Security-Policy": policy})
