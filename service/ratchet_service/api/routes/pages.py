"""Web pages, for a browser without the internet: all that they load comes from the installed packages, and the
Content-Security-Policy allows nothing else. They tell nothing themselves: the browser reads the REST API, with a token where the
service wants one."""

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
"""The package that has Swagger UI as files; nothing of its Python is used."""
_POLICY: Final = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
_SWAGGER_POLICY: Final = _POLICY + "script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
"""It sets style attributes."""


@cache
def _jobs_policy() -> str:
    """The policy of the page of jobs: the script and the style that stand in it, by their digests, and no other."""
    text = (_WEB / "jobs.html").read_text()
    [script], [style] = (re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("script", "style"))
    allowed = (
        f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in (script, style)
    )
    return _POLICY + "script-src {}; style-src {}; img-src data:".format(*allowed)


@router.get("/", dependencies=[OPEN])
def jobs() -> Response:
    """What runs and what waits, and one job's curve over its attempts."""
    return _page(_WEB / "jobs.html", _jobs_policy())


class DocsFile(StrEnum):
    START = "docs.js"
    SCRIPT = "swagger-ui-bundle.js"
    STYLE = "swagger-ui.css"


@router.get("/docs", dependencies=[OPEN])
def docs() -> Response:
    """Swagger UI on ``/openapi.json``."""
    return _page(_WEB / "docs.html", _SWAGGER_POLICY)


@router.get("/docs/{name}", dependencies=[OPEN])
def docs_file(name: DocsFile) -> Response:
    return _page(_WEB / name if name is DocsFile.START else _bundled(name), _SWAGGER_POLICY)


def _bundled(name: str) -> Path:
    found = find_spec(_BUNDLE)
    if found is None or found.origin is None:
        raise NotFound(
            f"this installation lacks the package {_BUNDLE}, which has this page's files: pip install 'ratchet-train[service]'",
            code="file-not-found",
        )
    return Path(found.origin).with_name("static") / name


def _page(path: Path, policy: str) -> Response:
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return FileResponse(path, headers=headers)
