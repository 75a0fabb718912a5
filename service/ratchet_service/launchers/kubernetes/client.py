"""Requests to the API server as plain JSON over HTTP. Address, credentials and connections come from the official client. Its
typed objects are not used: they lack fields that are newer than the client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast
from urllib.parse import urlencode

from ratchet_service.launchers.base import EngineUnreachable
from ratchet_service.launchers.kubernetes.settings import Settings

Json = dict[str, Any]

_CONNECT_TIMEOUT: Final = 5.0
_READ_TIMEOUT: Final = 15.0
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds, seconds, count: without keepalive, a watch on a silently lost connection would wait for its whole duration."""
_IN_CLUSTER: Final = "KUBERNETES_SERVICE_HOST"
_ADDRESS: Final = re.compile(r"<[^<>]* object at 0x[0-9a-f]+>: ")
"""In error messages of older versions of urllib3; the address differs at each try."""


class Refusal(Exception):
    """The server refused the request. ``code``: the HTTP status. ``reason``: from the answer's Status, or empty."""

    def __init__(self, code: int, body: bytes) -> None:
        try:
            status = json.loads(body)
        except ValueError:
            status = None
        if not isinstance(status, dict):  # of a proxy, which answers in the server's place
            status = {}
        self.code = code
        self.reason = str(status.get("reason", ""))
        self.message = str(status.get("message") or body.decode(errors="replace")[:500] or f"HTTP {code}")
        super().__init__(self.message)


class Api:
    """Requests to one cluster. Thread-safe. Methods raise ``EngineUnreachable`` for failures that mostly pass, such as no answer
    or a status of 500 and above, and ``Refusal`` for others."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Any = None
        self._lock = threading.Lock()

    def get(self, path: str, **query: str | int) -> Json:
        """Return the JSON of the object or list at ``path``; ``query``: parameters of the request."""
        return self._json("GET", path, query)

    def get_text(self, path: str, **query: str | int) -> str:
        """Return the body of an answer that is not JSON, such as a log."""
        return self._call("GET", path, query).decode(errors="replace")

    def create(self, path: str, body: Json) -> Json:
        """Create an object, and return it as the server stored it. Unknown fields are refused, not dropped."""
        return self._json("POST", path, {"fieldValidation": "Strict"}, body)

    def patch(self, path: str, body: Json) -> Json:
        """Apply a merge patch (RFC 7396) to an object, and return the changed object."""
        return self._json("PATCH", path, {}, body)

    def delete(self, path: str, **query: str | int) -> bool:
        """Request the deletion of an object, which may exist for some time afterwards. Return False if it does not exist."""
        try:
            self._call("DELETE", path, query)
        except Refusal as refusal:
            if refusal.code == 404:
                return False
            raise
        return True

    @contextlib.contextmanager
    def stream(self, path: str, seconds: float, **query: str | int) -> Iterator[Stream]:
        """Yield the response to a GET request, whose body is read as it arrives. ``seconds``: how long the server
        may be silent; reading fails ``_READ_TIMEOUT`` seconds later."""
        response = self._request("GET", path, query, None, read_timeout=seconds + _READ_TIMEOUT)
        try:
            if response.status >= 300:
                raise _error_for(response.status, _read_body(response))
            yield Stream(response)
        finally:
            response.close()

    def _json(self, method: str, path: str, query: Mapping[str, str | int], body: Json | None = None) -> Json:
        """Send a request and return the answer's JSON object. Raises as the class says."""
        try:
            answer = json.loads(self._call(method, path, query, body))
        except ValueError:
            answer = None
        if not isinstance(answer, dict):  # its text is not shown: a part of a Secret may be in it
            raise EngineUnreachable(f"Kubernetes answers {method} {path} with text that is not a JSON object")
        return answer

    def _call(self, method: str, path: str, query: Mapping[str, str | int], body: Json | None = None) -> bytes:
        """Send a request and return the answer's body. Raises as the class says."""
        response = self._request(method, path, query, body, read_timeout=_READ_TIMEOUT)
        data = _read_body(response)
        if response.status >= 300:
            raise _error_for(response.status, data)
        return data

    def _request(
        self, method: str, path: str, query: Mapping[str, str | int], body: Json | None, read_timeout: float
    ) -> Any:
        """Send a request and return the response, body unread and status unchecked. Raises ``EngineUnreachable``."""
        import urllib3

        client = self._get_client()
        headers = {"Accept": "application/json, */*", "User-Agent": "ratchet"}
        try:
            credentials = client.configuration.auth_settings()  # refreshes an expiring token
        except Exception as error:  # of a file that is being replaced, or of any of the client's ways to get a token
            text = f"the credentials for Kubernetes cannot be read: {type(error).__name__}: {error}"
            raise EngineUnreachable(text) from None
        for auth in credentials.values():
            if auth["in"] == "header" and auth["value"]:
                headers[auth["key"]] = auth["value"]
        data = None
        if body is not None:
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            data, headers["Content-Type"] = json.dumps(body).encode(), kind
        url = client.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        timeout = urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=read_timeout)
        try:
            return client.rest_client.pool_manager.request(
                method, url, body=data, headers=headers, timeout=timeout, retries=False, preload_content=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = _ADDRESS.sub("", str(error))
            raise EngineUnreachable(f"Kubernetes does not answer at {client.configuration.host}: {reason}") from None

    def _get_client(self) -> Any:
        """Return the official client, which the first call makes. Raises ``EngineUnreachable``."""
        with self._lock:
            if self._client is None:
                self._client = _connect(self._settings)
            return self._client


class Stream:
    """A response whose body is read as it arrives."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines that are not blank; blocks until the next one arrives. Raises ``EngineUnreachable`` if the
        connection breaks."""
        import urllib3

        buffer = b""
        try:
            while chunk := self._response.read1():  # ``stream`` would read an answer without chunks to its end first
                *lines, buffer = (buffer + chunk).split(b"\n")
                yield from (line for line in lines if line.strip())
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise EngineUnreachable(f"the watch was cut: {error}") from None

    def shutdown(self) -> None:
        """Shut the connection down; called from another thread, to end a wait in ``lines``."""
        connection = getattr(self._response, "connection", None)
        sock = getattr(connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _read_body(response: Any) -> bytes:
    """Return the whole body of a response. Raises ``EngineUnreachable`` if it cannot be read to its end."""
    import urllib3

    try:
        data: bytes = response.data
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise EngineUnreachable(f"Kubernetes cut its response short: {_ADDRESS.sub('', str(error))}") from None
    return data


def _error_for(code: int, body: bytes) -> Exception:
    """Return the error for a failure status: ``EngineUnreachable`` for 401, 408, 429 and 500 and above, otherwise ``Refusal``."""
    refusal = Refusal(code, body)
    if code in (401, 408, 429) or code >= 500:
        return EngineUnreachable(f"Kubernetes answers {code}: {refusal.message}")
    return refusal


def _connect(settings: Settings) -> Any:
    """Return an API client of the official package. Raises ``EngineUnreachable`` if no cluster is configured."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    configuration, load = client.Configuration(), cast(Any, config)
    try:
        if settings.kubeconfig is None and settings.context is None and os.environ.get(_IN_CLUSTER):
            load.load_incluster_config(configuration)
        else:
            load.load_kube_config(settings.kubeconfig, settings.context, configuration, persist_config=False)
    except (ConfigException, OSError) as error:
        raise EngineUnreachable(f"no Kubernetes cluster is configured: {error}") from None
    configuration.connection_pool_maxsize = 16
    configuration.socket_options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, option, value) for option, value in _KEEPALIVE),
    ]
    return client.ApiClient(configuration)
