"""``/metrics``, ``/healthz`` and ``/readyz`` of a reconciler without an API, on a separate port that requires no token."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.errors import RatchetError
from ratchet_contract.paths import HomePaths
from ratchet_contract.version import RATCHET_VERSION
from ratchet_service.api import problem_json
from ratchet_service.config.network import Listening
from ratchet_service.db.engine import Database
from ratchet_service.observability.health import Health, check
from ratchet_service.observability.metrics import Instruments

log = logging.getLogger(__name__)

_JSON: Final = "application/json"
_TIMEOUT_SECONDS: Final = 10.0
"""Time limit in seconds for each read and write on a connection."""


@contextmanager
def serve_health(
    listen: Listening | None, health: Health, database: Database, paths: HomePaths, instruments: Instruments
) -> Iterator[int | None]:
    """Serve ``/metrics``, ``/healthz`` and ``/readyz`` during the block, and yield the port. ``listen`` None: serve nothing, and
    yield None. Raises ``StartError``."""
    if listen is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_SECONDS

        def do_GET(self) -> None:
            """Answer one GET request."""
            status, kind, body = _answer(self.path.partition("?")[0], health, database, paths, instruments)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log a line of the HTTP server at debug level."""
            log.debug(format, *args)

    with listen.bind() as bound:
        address = bound.getsockname()
        server = ThreadingHTTPServer(address[:2], Handler, bind_and_activate=False)
        server.daemon_threads = True
        server.socket.close()
        server.socket = bound
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        log.info("metrics at http://%s:%d/metrics", *address[:2])
        try:
            yield address[1]
        finally:
            server.shutdown()
            thread.join()


def _answer(
    path: str, health: Health, database: Database, paths: HomePaths, instruments: Instruments
) -> tuple[int, str, bytes]:
    """Return status, media type and body of the answer to a GET of ``path``. An error's body is a problem."""
    try:
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, instruments.render(database)
        if path == "/healthz":
            return 200, _JSON, _ok_body({})
        if path == "/readyz":
            found = check(health, database, paths)
            return 200, _JSON, _ok_body({name: part.model_dump() for name, part in found.items()})
    except RatchetError as error:
        problem = problem_json.problem_of(error, path)
    except SQLAlchemyError as error:
        log.warning("%s: database: %s", path, error)
        problem = problem_json.problem(503, "database-unavailable", "the database does not answer", instance=path)
    else:
        problem = problem_json.problem(
            404, "no-such-route", "the paths are /metrics, /healthz and /readyz", instance=None
        )
    return problem.status, problem_json.MEDIA_TYPE, problem.model_dump_json().encode()


def _ok_body(components: dict[str, dict[str, str]]) -> bytes:
    """Return the JSON body of a successful answer."""
    body = {"status": "ok", "version": RATCHET_VERSION, **({"components": components} if components else {})}
    return json.dumps(body).encode()
