"""Requests with retries. GET and PUT are always safe to repeat; so is a POST, since it carries an Idempotency-Key."""

from __future__ import annotations

import os
import random
import ssl
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from ratchet_client.http.discovery import NEVER_STARTED, Target, find_target, is_loopback, protocol_mismatch
from ratchet_client.http.errors import ServiceUnreachable, error_from_response, no_service
from ratchet_contract import env_vars
from ratchet_contract.errors import RatchetError, Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.version import PROTOCOL_HEADER, PROTOCOL_VERSION, RATCHET_VERSION

Params = Mapping[str, str | int | float | bool | Sequence[str | int] | None]
_RETRY_STATUS = frozenset({429, 502, 503, 504})
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 2.0
_CONNECT = 10.0
_TAKEN = 600.0
"""Seconds that the service may take to store a large body, once it has been sent."""


def _without_none(params: Params | None) -> dict[str, Any]:
    """Return a copy of ``params`` without the parameters that are None."""
    return {k: v for k, v in (params or {}).items() if v is not None}


@dataclass(frozen=True)
class Body:
    """A request body that is sent in parts. ``parts``: returns a new iterator over its bytes, and is called for each try.
    ``size``: in bytes."""

    media_type: str
    size: int
    parts: Callable[[], Iterator[bytes]]


class TokenInClearWarning(UserWarning):
    """Warning that a token is sent over plain HTTP to another machine: anyone on the network path can read it."""


class Transport:
    """Sends requests to one service. ``timeout``: seconds without data after which a request fails; connections, streams and
    a ``Body`` have other limits. ``retry_for``: seconds within which a call retries. ``token`` is sent only to its server."""

    def __init__(
        self,
        server: str | None,
        home: str | os.PathLike[str] | None,
        timeout: float,
        retry_for: float,
        token: str | None = None,
    ) -> None:
        self._arguments = server, home, token
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT))
        self._retries_enabled = httpx.Timeout(timeout, connect=self._timeout.connect, read=max(timeout, _TAKEN))
        self.retry_for = retry_for
        self._reached = False
        self._clients: dict[tuple[bool, bool], httpx.Client] = {}

    @cached_property
    def target(self) -> Target:
        """The service and token to use, determined at the first access. Raises ``Refused`` if the configuration is invalid."""
        return find_target(*self._arguments)

    def address(self) -> str:
        """Return the server's address, or without one the service's run directory. Raise ``Refused`` if the configuration is
        invalid."""
        return (self.target.server or self.target.home).value

    def _url(self, path: str, params: Params | None) -> str:
        """Return the service's base URL. Raise ``Refused`` if this URL with ``path`` and ``params`` is not valid. Raise also the
        errors of ``Target.url``."""
        url = self.target.url()
        try:
            parsed = httpx.URL(url + path, params=_without_none(params))
            _ = parsed.host, parsed.raw_host.decode().encode("idna")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise Refused(f"server address {url!r} is not valid: {error}", code="invalid-address") from None
        return url

    def _authorization(self, url: str) -> dict[str, str]:
        """Return the header with the token for ``url``; empty if no token is sent there. Warns (``TokenInClearWarning``) about
        unencrypted transport to another machine."""
        token = self.target.token_for(url)
        if token is None:
            return {}
        if url.startswith("http:") and not is_loopback(url):
            text = f"the token is sent to {url} unencrypted: use https, or a tunnel to this machine"
            warnings.warn(text, TokenInClearWarning, stacklevel=1)  # a fixed location, so that it is shown once
        return {"Authorization": f"Bearer {token}"}

    def close(self) -> None:
        """Close all connections. A later request opens new ones."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def request(self, method: str, path: str, *, params: Params | None = None, json: Any = None,
                idempotency_key: str | None = None, body: Body | None = None) -> httpx.Response:  # fmt: skip
        """Send a request and return the 2xx response. While the service does not respond or is busy, retry for up to
        ``retry_for`` seconds, which blocks. A DELETE that may have arrived is not repeated, and nothing is retried if no service
        was started. ``idempotency_key``: the key of a POST; default: a random key. ``body``: sent instead of ``json``.

        Raise the service's problem as a ``RatchetError``, ``ServiceUnreachable`` without a response, ``ServiceFault`` if another
        program responds, and ``Refused`` for an unusable configuration or a service with another protocol.
        """
        headers = {}
        if body is not None:
            headers = {"Content-Type": body.media_type, "Content-Length": str(body.size)}
        if method == "POST":
            headers["Idempotency-Key"] = idempotency_key or str(uuid.uuid4())
        end, delay = time.monotonic() + self.retry_for, _FIRST_DELAY
        while True:
            try:
                return self._request_once(method, path, params, json, headers, body)
            except RatchetError as error:
                if time.monotonic() >= end or not self._may_retry(method, error):
                    raise
            time.sleep(min(delay * random.uniform(0.5, 1.0), max(0.0, end - time.monotonic())))
            delay = min(delay * 2, _LONGEST_DELAY)

    @contextmanager
    def stream(
        self, path: str, params: Params | None, headers: Mapping[str, str], read: float = 60.0
    ) -> Iterator[httpx.Response]:
        """Send a GET request once and yield the open response. ``read``: maximum seconds without data. Raise
        ``ServiceUnreachable``, also if the connection breaks during the block, or the errors of ``request``."""
        url = self._url(path, params)
        # The default suits event streams: the service sends comments while it has no event.
        timeout = httpx.Timeout(self._timeout.connect, read=read)
        headers = {**headers, **self._authorization(url)}
        try:
            with self._client(url).stream(
                "GET", url + path, params=_without_none(params), headers=headers, timeout=timeout
            ) as response:
                _raise_if_foreign(response)
                self._reached = True
                if not response.is_success:
                    response.read()
                    raise error_from_response(response)
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(url, error) from error

    def _client(self, url: str) -> httpx.Client:
        """Return the HTTP client for ``url``, created at first use. Encrypted and plain addresses have separate clients, and so
        have this machine and other machines."""
        secure, local = url.startswith("https:"), is_loopback(url)
        if (secure, local) not in self._clients:
            # A proxy from the environment would break requests to this machine; for other machines it is wanted.
            self._clients[secure, local] = httpx.Client(
                timeout=self._timeout, trust_env=not local, verify=self._authorities() if secure else not local,
                headers={"User-Agent": f"ratchet-client/{RATCHET_VERSION}"},
            )  # fmt: skip
        return self._clients[secure, local]

    def _authorities(self) -> ssl.SSLContext | bool:
        """Return the certificate authorities that verify the server; True for httpx's default. Raise ``Refused`` if a file of
        certificates cannot be used."""
        given = os.environ.get(env_vars.CA_FILE)
        file = Path(given) if given else HomePaths(Path(self.target.home.value)).service_authorities
        if not given and (self.target.server is not None or not file.exists()):
            return True
        try:
            return ssl.create_default_context(cafile=file)
        except (OSError, ValueError) as error:
            text = f"the CA certificates in {file} cannot be used ({error}): they must be PEM ({env_vars.CA_FILE})"
            raise Refused(text, code="invalid-config") from None

    def _request_once(self, method: str, path: str, params: Params | None, json: Any, headers: dict[str, str],
                      body: Body | None) -> httpx.Response:  # fmt: skip
        """Send the request once and return the 2xx response. Raise the errors of ``request``, and errors of the body."""
        url = self._url(path, params)
        headers = headers | self._authorization(url)
        try:
            response = self._client(url).request(
                method, url + path, params=_without_none(params), json=json, headers=headers,
                content=None if body is None else body.parts(),
                timeout=self._timeout if body is None else self._retries_enabled,
            )  # fmt: skip
        except httpx.TransportError as error:
            raise self._unreachable(url, error) from error
        _raise_if_foreign(response)
        self._reached = True
        if not response.is_success:
            raise error_from_response(response)
        return response

    def _may_retry(self, method: str, error: RatchetError) -> bool:
        """Return True if a failed request may succeed later and may be sent again: not a DELETE that may have arrived, and not if
        no service has been found."""
        # A second DELETE would get 404, which would misreport the first.
        if isinstance(error, ServiceUnreachable):
            is_found = error.code != NEVER_STARTED or self._reached
            return is_found and (method != "DELETE" or not error.extra.get("sent", False))
        # A request whose response was lost may still be in progress: its key is rejected until it is done.
        is_busy = error.extra.get("status") in _RETRY_STATUS or error.code == "idempotency-in-progress"
        return is_busy and method != "DELETE"

    def _is_foreign(self, error: httpx.TransportError) -> bool:
        """Return True if ``error`` suggests that another program listens at a specified address. Such an error is a response that
        is not HTTP, or a connection closed without a response. The service must not have responded before."""
        return isinstance(error, httpx.RemoteProtocolError) and self.target.server is not None and not self._reached

    def _unreachable(self, url: str, error: httpx.TransportError) -> ServiceUnreachable:
        """Return the ``ServiceUnreachable`` for ``error``. Its ``extra["sent"]`` is False if no connection to the service was
        made."""
        sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        what = str(error) or type(error).__name__
        if "WRONG_VERSION_NUMBER" in what:
            cure = f"it speaks plain HTTP there: write http://{url.removeprefix('https://')}"
        elif self._is_foreign(error) and url.startswith("http:"):
            cure = f"the program there does not speak HTTP: check the address, or write https://{url.removeprefix('http://')}"
        elif is_loopback(url):
            cure = f"service not running? {self.target.start_hint()}"
        else:
            cure = "check the address and the network, and that the service runs there"
        return ServiceUnreachable(f"no answer from {url} ({what}): {cure}", sent=sent)


def _raise_if_foreign(response: httpx.Response) -> None:
    """Raise ``Refused`` for a response with another protocol version, and ``ServiceFault`` for a 2xx response of another
    program."""
    protocol = response.headers.get(PROTOCOL_HEADER)
    address = str(response.request.url.copy_with(path="/", query=None)).rstrip("/")
    if protocol is not None and protocol != str(PROTOCOL_VERSION):
        raise protocol_mismatch(f"the service at {address}", protocol)
    if protocol is None and response.is_success:  # every response of the API has the header
        raise no_service(response)
