"""One HTTP connection to the attempt's service, and the interpretation of its responses."""

from __future__ import annotations

import http.client
import json
import os
import select
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from pydantic import ValidationError

from ratchet_contract.errors import PROBLEM_TYPE_PREFIX
from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import AgentReport, Control, ControlNews, LaunchFile, ReportAck, ServiceFile
from ratchet_contract.version import PROTOCOL_VERSION, REPORT_AFTER_HEADER

_TIMEOUT: Final = 5.0
_MAX_RESPONSE_BYTES: Final = 1024 * 1024
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_DENIALS: Final = 3  # with at least _DENIAL_TIME seconds between the first and the last
_DENIAL_TIME: Final = 0.3
LONGEST_WAIT: Final = 60.0
"""The longest ``Retry-After``, in seconds, that is followed: a desired state must still reach the ranks."""


class Unreachable(Exception):
    """Raised if there is no usable response now; the caller may retry. ``retry_after_seconds``: the wait that the service
    requested, or 0.0."""

    retry_after_seconds: float = 0.0


class TooLarge(Exception):
    """Raised if the service has responded with 413: the caller must send less per request."""


class Fenced(Exception):
    """Raised if the service does not accept this attempt any more: its ranks must end at once."""


class Denied(Exception):
    """Raised if the service does not have, or does not give, what a download requested."""


class ServiceLink:
    """One HTTP connection to the service at a time, opened when a request needs it. Not thread-safe."""

    def __init__(self, launch: LaunchFile) -> None:
        self._launch = launch
        self._file = Path(launch.service_file)
        self._root = f"/v1/jobs/{launch.job_id}/attempts/{launch.attempt}/"
        self._path = f"{self._root}reports"
        self._connection: http.client.HTTPConnection | None = None
        self._prefix = ""
        self._denied_at: list[float] = []
        self._watching = False  # True if the connection waits for the response to ``watch``
        self._retry_after_seconds = 0.0  # Retry-After of the last response
        self.report_after = 0.0  # seconds that figures should wait, according to the last response

    def has_address(self) -> bool:
        """True if an address of the service is configured or ``service.json`` exists. Does not connect."""
        return self._launch.service_url is not None or self._file.exists()

    def address(self) -> tuple[str, int]:
        """Host and port of the service, without connecting. Raises ``Unreachable`` if no usable address is known."""
        url = self._url()
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    def post(self, report: AgentReport, timeout: float | None = None) -> ReportAck:
        """Send one report and return the acknowledgement. ``timeout``: seconds for each network operation, at most 5. Raises
        ``Unreachable``, ``TooLarge`` or ``Fenced``."""
        body = report.model_dump_json().encode()
        try:
            status, data = self._exchange(body, min(_TIMEOUT, timeout or _TIMEOUT))
        except (OSError, http.client.HTTPException) as error:
            self._close()
            raise Unreachable(f"no answer from the service: {type(error).__name__}: {error}") from error
        if status != 200:
            self._raise_for_status(status, data)
        self._denied_at.clear()
        try:
            ack = ReportAck.model_validate_json(data)
        except ValidationError as error:
            self._close()
            raise Unreachable(
                f"the answer on {self._path} is no valid report reply: {error.errors()[0]['msg']}"
            ) from None
        if ack.protocol != PROTOCOL_VERSION:
            raise Unreachable(f"the service speaks protocol {ack.protocol}, this agent {PROTOCOL_VERSION}")
        return ack

    def watch(self, control: Control, seconds: float) -> None:
        """Request a response as soon as the job's requests differ from ``control``, at the latest after ``seconds``; ``has_news``
        reads it. Does not wait. Without an open connection, do nothing. The next report ends the watch."""
        if self._connection is None or self._connection.sock is None:
            return
        query = f"desired={control.desired}&checkpoint_request={control.checkpoint_request}&wait={seconds:.1f}"
        try:
            self._send("GET", f"{self._root}control?{query}", None, {}, _TIMEOUT)
        except (OSError, http.client.HTTPException):
            self._close()
        else:
            self._watching = True

    def has_news(self) -> bool:
        """Return True, once, if the service has responded to ``watch`` that requests have changed. Does not wait for the
        response."""
        if not self._watching or self._connection is None or not _is_readable(self._connection):
            return False
        self._watching = False
        try:
            answer = self._connection.getresponse()
            data = answer.read(_MAX_RESPONSE_BYTES)
            if answer.will_close or not answer.isclosed():
                self._close()
            return answer.status == 200 and ControlNews.model_validate_json(data).changed
        except (OSError, http.client.HTTPException, ValidationError):
            self._close()
            return False

    @contextmanager
    def fetch(self, name: str) -> Iterator[http.client.HTTPResponse]:
        """Context manager: send a GET for ``name``, and yield the response with status 200. Raises ``Unreachable``, ``TooLarge``,
        ``Denied`` or ``Fenced``; errors of reading the body are raised as they are."""
        try:
            answer = self._request("GET", self._root + name, None, {}, _TIMEOUT)
            data = b"" if answer.status == 200 else answer.read(_MAX_RESPONSE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self._close()
            raise Unreachable(f"no answer from the service: {type(error).__name__}: {error}") from error
        code, detail = _parse_problem(data)
        if answer.status == 404 and code is not None:
            raise Denied(f"{detail} (404 {code})")
        if answer.status != 200:
            self._raise_for_status(answer.status, data)
        try:
            yield answer
        finally:
            self._close()

    def _exchange(self, body: bytes, timeout: float) -> tuple[int, bytes]:
        """Post ``body`` as a report; return status and body of the response. After an ``OSError`` or ``HTTPException`` the caller
        must ``_close``."""
        answer = self._request("POST", self._path, body, {"Content-Type": "application/json"}, timeout)
        data = answer.read(_MAX_RESPONSE_BYTES)
        if answer.will_close or not answer.isclosed():
            self._close()
        return answer.status, data

    def _request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> http.client.HTTPResponse:
        """Send a request and return the response, whose body is not read yet. ``path``: without the prefix of the service's
        URL."""
        connection = self._send(method, path, body, headers, timeout)
        answer = connection.getresponse()
        self._retry_after_seconds = parse_retry_after(answer.getheader("Retry-After"))
        self.report_after = parse_seconds(answer.getheader(REPORT_AFTER_HEADER))
        return answer

    def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> http.client.HTTPConnection:
        """Send a request and return its connection. A connection that waits for the response to ``watch`` is closed first."""
        if self._watching:
            self._close()
        connection = self._connection or self._connect()
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        token = {"Authorization": f"Bearer {self._launch.report_token}"}
        connection.request(method, self._prefix + path, body, {**headers, **token})
        return connection

    def _connect(self) -> http.client.HTTPConnection:
        """Prepare a new connection to the service's current address; it is opened by the first request. Raises
        ``Unreachable``."""
        url = self._url()
        assert url.hostname is not None
        if url.scheme == "https":
            context = tls_context(self._launch)
            self._connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=_TIMEOUT, context=context)
        else:
            self._connection = http.client.HTTPConnection(url.hostname, url.port, timeout=_TIMEOUT)
        self._prefix = url.path.rstrip("/")
        return self._connection

    def _url(self) -> SplitResult:
        """Return the URL of the service, from the launch file or ``service.json``. Raises ``Unreachable`` if no usable one is
        known."""
        given = self._launch.service_url
        text = given if given is not None else self._service().url
        url = urlsplit(text)
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise Unreachable(f"{'the launch file' if given else self._file} names no http address: {text!r}")
        return url

    def _service(self) -> ServiceFile:
        """The content of ``service.json``. Raises ``Unreachable`` if the file cannot be read or its service has another protocol
        version."""
        try:
            service = ServiceFile.model_validate_json(self._file.read_bytes())
        except (OSError, ValidationError) as error:
            raise Unreachable(f"no service is known from {self._file}: {type(error).__name__}") from None
        if service.protocol != PROTOCOL_VERSION:
            raise Unreachable(f"the service speaks protocol {service.protocol}, this agent {PROTOCOL_VERSION}")
        return service

    def _close(self) -> None:
        """Close the connection, if there is one; the next request opens another."""
        self._watching = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _raise_for_status(self, status: int, data: bytes) -> None:
        """Raise the exception for an error response: ``Fenced``, ``TooLarge`` or ``Unreachable``. Never returns. ``data``: the
        body."""
        code, detail = _parse_problem(data)
        if status == 409 and code == "stale-attempt":
            raise Fenced(f"the service refused this attempt (409 {code}): {detail}")
        if status == 413:
            raise TooLarge
        self._close()  # the responder may be another server: look up the address again
        if status in (401, 403, 404, 410) and code is not None:
            self._record_denial(f"{status} {code}: {detail}")
        unreachable = Unreachable(f"the service answered {status} {code or ''}")
        if status in (429, 503):
            unreachable.retry_after_seconds = self._retry_after_seconds
        raise unreachable

    def _record_denial(self, what: str) -> None:
        """Record that the service does not know the job or its token. Raises ``Fenced`` after repeated denials by the
        attempt's own service; those of other services do not count. Raises ``Unreachable`` if no service is known."""
        now = time.monotonic()
        # while the attempt's own service is down, another one may have taken its port
        self._denied_at = [*self._denied_at, now] if self._is_own_service() else []
        if len(self._denied_at) >= _DENIALS and now - self._denied_at[0] >= _DENIAL_TIME:
            raise Fenced(f"the service does not know this attempt ({what})")

    def _is_own_service(self) -> bool:
        """True if the responding service is, as far as can be seen, the attempt's own. May raise ``Unreachable``."""
        if self._launch.service_url is not None:
            return True
        service = self._service()
        if urlsplit(service.url).hostname not in _LOOPBACK:
            return True
        try:
            os.kill(service.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def _is_readable(connection: http.client.HTTPConnection) -> bool:
    """True if a response, or the connection's end, has arrived."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def parse_retry_after(header: str | None) -> float:
    """Return the header's value in seconds, at most ``LONGEST_WAIT``; 0.0 if it is missing or not a whole number."""
    text = (header or "").strip()
    if not (text.isascii() and text.isdigit()):
        return 0.0
    return min(LONGEST_WAIT, float(text[:9]))


def parse_seconds(header: str | None) -> float:
    """The header's value in fractional seconds, at most ``LONGEST_WAIT``; 0.0 if it is missing, negative or not a number."""
    try:
        seconds = float((header or "")[:20])
    except ValueError:
        return 0.0
    return min(LONGEST_WAIT, seconds) if seconds > 0 else 0.0  # false for NaN as well


def tls_context(launch: LaunchFile) -> ssl.SSLContext:
    """Return a TLS context with the service's certificate authorities or, if none are known, the system's. Raises ``Unreachable``
    if they are invalid."""
    file = HomePaths(Path(launch.service_file).parent).service_authorities
    try:
        authorities = file.read_text(encoding="ascii")
    except OSError:
        authorities = launch.service_ca or ""
    try:
        return ssl.create_default_context(cadata=authorities or None)
    except (ssl.SSLError, ValueError) as error:
        raise Unreachable(f"the service's CA certificates cannot be read: {error}") from None


def _parse_problem(data: bytes) -> tuple[str | None, str]:
    """``code`` and ``detail`` of a problem+json body from a Ratchet service; ``(None, "")`` for any other body."""
    try:
        body: Any = json.loads(data)
        if str(body["type"]).startswith(PROBLEM_TYPE_PREFIX):
            return str(body["code"]), str(body.get("detail", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None, ""
