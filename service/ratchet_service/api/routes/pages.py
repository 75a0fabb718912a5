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
from ratchet_service.api.conditional_requests import matches
from ratchet_service.api.web_bundle import bundle, report_page, style

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


CHUNKS: Final = {
    "main.js": ("app/main.js",),
    "job.js": ("vendor/uPlot.js", "app/pages/compare.js", "app/pages/job.js"),
}
"""Scripts with modules that they have. The second one has the charts, which the list of jobs does not need. uPlot comes first:
between others it would be too long for gzip to find the same words on both sides, which costs 1 KB."""
WITHOUT: Final = ("app/recorded_answers.js",)
"""What only a report loads."""


class _File(NamedTuple):
    """A file of the pages. ``etag``: changes with the content; weak, since the file and its compressed form share it."""

    content: bytes
    packed: bytes
    etag: str


@lru_cache(maxsize=1)
def _files(_modified: tuple[tuple[Path, int], ...]) -> dict[str, _File]:
    """Return all files of the pages by name, made and compressed once per change of what they are made of."""
    texts = {name: (_WEB / name).read_text(encoding="utf-8") for name in ("index.html", "icon.svg")}
    texts |= {**bundle(_WEB, CHUNKS, WITHOUT), "style.css": style(_WEB), "report.html": report_page(_WEB)}
    contents = {name: text.encode() for name, text in texts.items()}
    return {
        name: _File(content, gzip.compress(content, 9, mtime=0), f'W/"{xxhash.xxh3_64_hexdigest(content)}"')
        for name, content in contents.items()
    }


@router.get("/", dependencies=[OPEN])
def index(accept_encoding: Annotated[str, Header()] = "", if_none_match: Annotated[str, Header()] = "") -> Response:
    """Return the page that all addresses of the web pages have in common: they differ only behind the ``#``."""
    return file("index.html", accept_encoding, if_none_match)


@router.get("/web/{name}", dependencies=[OPEN])
def file(
    name: str,
    accept_encoding: Annotated[str, Header()] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """Return a file that the pages load, compressed if the browser accepts that; 304 if it has it. Raises ``NotFound``
    (``file-not-found``)."""
    files = _files(tuple((path, path.stat().st_mtime_ns) for path in sorted(_WEB.rglob("*.*"))))
    if name not in files:
        raise NotFound(f"the web pages have no file {name!r}", code="file-not-found")
    found = files[name]
    headers = {**_HEADERS, "Content-Security-Policy": _POLICY, "ETag": found.etag, "Vary": "Accept-Encoding"}
    if name == "report.html":
        headers["Content-Security-Policy"] = _COMMON  # it states the rest itself
    if matches(if_none_match, found.etag):
        return Response(status_code=304, headers=headers)
    packed = "gzip" in accept_encoding and "gzip;q=0" not in accept_encoding.replace(" ", "")
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(found.packed if packed else found.content, headers=headers, media_type=_TYPES[Path(name).suffix])


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
