"""The outermost layer: errors become problems, and answers are counted. ``OwnMachineOnly``, for a service without tokens, refuses
requests of foreign web pages and through proxies."""

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
from ratchet_service.api import problem_json
from ratchet_service.db.sanitize import printable
from ratchet_service.observability import disk_space
from ratchet_service.observability import logging as log_format
from ratchet_service.observability.metrics import Instruments

log = logging.getLogger("ratchet.service")
_PROTOCOL: Final = (PROTOCOL_HEADER.lower().encode(), str(PROTOCOL_VERSION).encode())
REQUEST_ID: Final = b"x-request-id"
_VALID_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_CLIENT_CLOSED_REQUEST: Final = 499
"""The status (nginx's) under which a request is counted if its client disconnected before it had sent all of it. No answer is
sent."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


def problem_response(
    status: int,
    code: str,
    detail: str,
    path: str,
    errors: list[FieldProblem] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a response whose body is a problem (``application/problem+json``). ``errors``: problems of single fields;
    ``headers``: additional ones."""
    body = problem_json.problem(status, code, detail, instance=printable(path), errors=errors)
    return Response(
        body.model_dump_json(), status, problem_json.headers_of(status, code) | (headers or {}), problem_json.MEDIA_TYPE
    )


def install(app: FastAPI, instruments: Instruments) -> None:
    """Add the exception handlers and the ``ErrorsAndMetrics`` middleware to ``app``, after all other middleware: the last one is
    the outermost."""
    app.add_exception_handler(RatchetError, _ratchet_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)
    app.add_exception_handler(OperationalError, _database_unavailable)
    app.add_exception_handler(PoolTimeout, _database_unavailable)
    app.add_exception_handler(DBAPIError, _database_unavailable)
    app.add_exception_handler(OSError, _disk_full)
    app.add_middleware(ErrorsAndMetrics, instruments=instruments)


def _ratchet_error(request: Request, error: Exception) -> Response:
    """Answer with the problem of a ``RatchetError``; its ``retry_after`` becomes the header Retry-After."""
    assert isinstance(error, RatchetError)
    status = problem_json.status_of(error)
    if status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, error.detail, exc_info=error)
    wait = error.extra.get("retry_after")
    headers = None if wait is None else {"Retry-After": str(math.ceil(wait))}
    return problem_response(status, error.code, error.detail, request.url.path, error.errors, headers)


def _http_error(request: Request, error: Exception) -> Response:
    """Answer with a problem for an error of Starlette, such as an unknown path."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return problem_response(404, "no-such-route", f"there is nothing at {path}; see /openapi.json", path)
    if error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request))
        text = f"{request.method} is not possible at {path}: use {allowed}"
        return problem_response(405, "method-not-allowed", text, path, headers={"Allow": allowed})
    return problem_response(error.status_code, "refused", str(error.detail), path, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes of the API that match the request's path, sorted."""
    scope = dict(request.scope)
    # Starlette itself names only the methods of the first route
    routes = [r for r in request.app.state.routes if r.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods})


def _invalid_parameters(request: Request, error: Exception) -> Response:
    """Answer 422 (``invalid-parameter``) for invalid query, path or header values, with a limited number of field problems."""
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


def _database_unavailable(request: Request, error: Exception) -> Response:
    """Answer 507 for a full disk; 503 for an ``OperationalError``, a timeout of the pool or a lost connection; 500 otherwise."""
    if disk_space.is_disk_full_error(error, request.app.state.service.settings.home):
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
    """Answer 507 (``disk-full``) for a full disk, 500 for any other error of the operating system or the database."""
    service = request.app.state.service
    home = service.settings.home
    if not disk_space.is_disk_full_error(error, home):
        return internal_error(request.method, request.url.path, error)
    log.error("%s %s: %s", request.method, request.url.path, error)
    if isinstance(error, DBAPIError) and not service.database.is_sqlite:
        text = "the disk of the database server is full: nothing was changed; make room there"
        return problem_response(507, disk_space.CODE, text, request.url.path)
    return problem_response(
        507, disk_space.CODE, disk_space.disk_full_error(home, "nothing was changed").detail, request.url.path
    )


def internal_error(method: str, path: str, error: BaseException) -> Response:
    """Log ``error`` with its traceback under a new incident number, and return a 500 problem that contains only the number."""
    incident = secrets.token_hex(6)
    log.error("incident %s: %s %s", incident, method, path, exc_info=error, extra={"incident": incident})
    text = f"something went wrong in the service; its log has the details under incident {incident}"
    return problem_response(500, "internal-error", text, path)


class ErrorsAndMetrics:
    """ASGI middleware that counts answers, adds headers such as the request id, and turns exceptions before an answer into
    problems."""

    def __init__(self, app: ASGIApp, instruments: Instruments) -> None:
        self._app, self._instruments = app, instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. After ``ClientDisconnect`` (the client did not send the whole request) no answer is sent."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        status = 0
        request_id = _request_id(scope)
        log_format.add_log_fields(request_id=request_id)
        request_id_header = (REQUEST_ID, request_id.encode())

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), _PROTOCOL, request_id_header]
                self._instruments.observe_request(_method(scope), _route(scope), status, time.monotonic() - begin)
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        except ClientDisconnect:
            if status:
                raise
            log.info("%s %s: the client disconnected before its request was complete", scope["method"], scope["path"])
            self._instruments.observe_request(
                _method(scope), _route(scope), _CLIENT_CLOSED_REQUEST, time.monotonic() - begin
            )
        except Exception as error:
            if status:
                raise  # the answer has begun; the server closes the connection, so that the client sees it is incomplete
            await internal_error(scope["method"], scope["path"], error)(scope, receive, send_observed)


def _request_id(scope: Scope) -> str:
    """Return the caller's X-Request-Id if it has 1 to 64 letters, digits, ``.``, ``_`` or ``-``; otherwise a new random id."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _VALID_REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


def _method(scope: Scope) -> str:
    """Return the request's method as a metric label; "other" for a method that HTTP does not define."""
    method = str(scope["method"])
    return method if method in METHODS else "other"


def _route(scope: Scope) -> str:
    """Return the template of the route's path, such as ``/v1/jobs/{job_id}``, as a metric label. "none": no route of the
    API matched, such as for ``/openapi.json``."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))


_HOST: Final = re.compile(r"(localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_PROXY_HEADERS: Final = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
_CURE: Final = "start the service with --auth token and send a token"


class OwnMachineOnly:
    """ASGI middleware that answers 403 (``foreign-origin``) to requests without a loopback Host, through a proxy or of a
    foreign web page, as far as their headers show that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to an HTTP request with a ``_foreign_origin_reason``; pass anything else on to the app."""
        if scope["type"] == "http":
            fault = _foreign_origin_reason(scope["headers"], scope["scheme"])
            if fault is not None:
                text = f"no token is needed here, so only programs on this machine may send requests: {fault}; {_CURE}"
                await problem_response(403, "foreign-origin", text, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _foreign_origin_reason(headers: Sequence[tuple[bytes, bytes]], scheme: str) -> str | None:
    """Return why the headers are refused: no loopback Host, a proxy, or a foreign web page; None: they are accepted."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1 or _HOST.fullmatch(hosts[0]) is None:
        return f"the request is for {', '.join(hosts)[:100] or 'no host'!r}"
    for name, value in headers:
        text = value.decode("latin-1")
        if name in _PROXY_HEADERS:
            return f"the request came through a proxy ({name.decode()})"
        if name == b"origin" and text.lower() != f"{scheme}://{hosts[0]}".lower():
            return f"the request is of a web page of {text[:100]!r}"
        if name == b"sec-fetch-site" and text not in ("same-origin", "none"):
            return "the request is of another site's web page"
    return None
