"""The outermost layer: every error becomes a problem, every answer is counted. A traceback goes to the log, never to a caller."""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet_contract.errors import FieldProblem, RatchetError
from ratchet_contract.version import PROTOCOL_HEADER, PROTOCOL_VERSION
from ratchet_service import disk, log_format, problems
from ratchet_service.instruments import Instruments

log = logging.getLogger("ratchet.service")
_PROTOCOL: Final = (PROTOCOL_HEADER.lower().encode(), str(PROTOCOL_VERSION).encode())
REQUEST_ID: Final = b"x-request-id"
_GIVEN_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_LEFT: Final = 499
"""How a request is counted whose client went before it was whole: nginx's number; nobody is there for an answer."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


def problem_response(
    status: int,
    code: str,
    detail: str,
    path: str,
    errors: list[FieldProblem] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    body = problems.problem(status, code, detail, instance=problems.printable(path), errors=errors)
    return Response(
        body.model_dump_json(), status, problems.headers_of(status, code) | (headers or {}), problems.MEDIA_TYPE
    )


def install(app: FastAPI, instruments: Instruments) -> None:
    """Add the handlers and the layer."""
    app.add_exception_handler(RatchetError, _ratchet_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)
    app.add_exception_handler(OperationalError, _database_away)
    app.add_exception_handler(PoolTimeout, _database_away)
    app.add_exception_handler(DBAPIError, _database_away)
    app.add_exception_handler(OSError, _disk_full)
    app.add_middleware(Edge, instruments=instruments)


def _ratchet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RatchetError)
    status = problems.status_of(error)
    if status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, error.detail, exc_info=error)
    wait = error.extra.get("retry_after")
    headers = None if wait is None else {"Retry-After": str(math.ceil(wait))}
    return problem_response(status, error.code, error.detail, request.url.path, error.errors, headers)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return problem_response(404, "no-such-route", f"there is nothing at {path}; see /openapi.json", path)
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        text = f"{request.method} is not possible at {path}: use {allowed}"
        return problem_response(405, "method-not-allowed", text, path, headers={"Allow": allowed})
    return problem_response(error.status_code, "refused", str(error.detail), path, headers=headers)


def _allowed(request: Request) -> list[str]:
    """Methods of every route that this path belongs to; Starlette itself names those of the first one only."""
    scope = dict(request.scope)
    routes = [r for r in request.app.state.routes if r.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods})


def _invalid_parameters(request: Request, error: Exception) -> Response:
    """Wrong query, path or header values; ``pointer`` is ``/query/<name>`` and the like."""
    assert isinstance(error, RequestValidationError)
    found: Sequence[Any] = error.errors()[:50]
    errors = [
        FieldProblem(
            pointer="".join(f"/{part}" for part in item["loc"]),
            code=str(item["type"]).replace("_", "-"),
            detail=str(item["msg"]),
        )
        for item in found
    ]
    detail = f"{errors[0].pointer}: {errors[0].detail}" if errors else "a parameter is wrong"
    return problem_response(422, "invalid-parameter", detail, request.url.path, errors)


def _database_away(request: Request, error: Exception) -> Response:
    """A locked or unreachable database is worth another try; anything else that it refuses is a fault of ours."""
    if disk.is_full(error, request.app.state.service.settings.home):
        return _disk_full(request, error)
    if isinstance(error, OperationalError | PoolTimeout) or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    ):
        log.warning("%s %s: database: %s", request.method, request.url.path, error)
        return problem_response(
            503, "database-unavailable", "the database does not answer: try again in a moment", request.url.path
        )
    return internal_error(request.method, request.url.path, error)


def _disk_full(request: Request, error: Exception) -> Response:
    """Any other error of the system is a fault of ours."""
    service = request.app.state.service
    home = service.settings.home
    if not disk.is_full(error, home):
        return internal_error(request.method, request.url.path, error)
    log.error("%s %s: %s", request.method, request.url.path, error)
    if isinstance(error, DBAPIError) and not service.database.is_sqlite:
        text = "the disk of the database server is full: nothing was changed; make room there"
        return problem_response(507, disk.CODE, text, request.url.path)
    return problem_response(507, disk.CODE, disk.full(home, "nothing was changed").detail, request.url.path)


def internal_error(method: str, path: str, error: BaseException) -> Response:
    incident = secrets.token_hex(6)
    log.error("incident %s: %s %s", incident, method, path, exc_info=error, extra={"incident": incident})
    text = f"something went wrong in the service; its log has the details under incident {incident}"
    return problem_response(500, "internal-error", text, path)


class Edge:
    """Counts answers and turns what nobody caught into a 500 problem."""

    def __init__(self, app: ASGIApp, instruments: Instruments) -> None:
        self._app, self._instruments = app, instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        status = 0
        request_id = _request_id(scope)
        log_format.now_about(request_id=request_id)
        named = (REQUEST_ID, request_id.encode())

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), _PROTOCOL, named]
                self._instruments.observe(_method(scope), _route(scope), status, time.monotonic() - begin)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            if status:
                raise
            log.info("%s %s: the client left before its request was whole", scope["method"], scope["path"])
            self._instruments.observe(_method(scope), _route(scope), _LEFT, time.monotonic() - begin)
        except Exception as error:
            if status:
                raise  # the answer has begun; the server cuts the connection, so that nobody takes it for whole
            await internal_error(scope["method"], scope["path"], error)(scope, receive, watch)


def _request_id(scope: Scope) -> str:
    """The caller's own, where it fits into a log and a header; else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _GIVEN_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in METHODS else "other"


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
