"""Web pages for a browser without internet access. They load only installed files; their data come from the REST API."""

from __future__ import annotations

import base64
import hashlib
import re
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from ratchet_contract.errors import NotFound
from ratchet_service.api.authentication import OPEN

router = APIRouter(include_in_schema=False)
_WEB: Final = Path(__file__).parents[2] / "web"
_BUNDLE: Final = "fastapi_offline"
"""The package that contains Swagger UI as files. None of its Python code is used."""
_POLICY: Final = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
_SWAGGER_POLICY: Final = _POLICY + "script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
"""The policy of Swagger UI's page. Swagger UI sets style attributes, so inline styles are allowed."""


@cache
def _jobs_policy() -> str:
    """Return the Content-Security-Policy of the page of jobs. It allows no script and style but the page's own inline ones."""
    text = (_WEB / "jobs.html").read_text()
    [script], [style] = (re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("script", "style"))
    allowed = (
        f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in (script, style)
    )
    return _POLICY + "script-src {}; style-src {}; img-src data:".format(*allowed)


@router.get("/", dependencies=[OPEN])
def jobs() -> Response:
    """Return the page with the list of jobs, which also shows one job's metrics over its attempts."""
    return _page(_WEB / "jobs.html", _jobs_policy())


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
    """Return the file as a response with ``policy`` as its Content-Security-Policy. Browsers must ask each time whether it has
    changed."""
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return FileResponse(path, headers=headers)
