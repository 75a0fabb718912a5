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

from ratchet_client.discovery import NEVER_STARTED, Target, find_target, is_loopback, other_protocol
from ratchet_client.errors import ServiceUnreachable, error_of, no_service
from ratchet_contract import environment
from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.version import PROTOCOL_HEADER, PROTOCOL_VERSION, RATCHET_VERSION

Params = Mapping[str, str | int | float | bool | Sequence[str | int] | None]
_RETRY_STATUS = frozenset({429, 502, 503, 504})
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 2.0
_CONNECT = 10.0
_TAKEN = 600.0
"""Seconds that a large body may take to be stored, once it has been sent."""


def _clean(params: Params | None) -> dict[str, Any]:
    return {k: v for k, v in (params or {}).items() if v is not None}


@dataclass(frozen=True)
class Body:
    """A body too large to be held. ``parts`` begins it anew for each try; ``size``: bytes. Its answer may take its time."""

    media_type: str
    size: int
    parts: Callable[[], Iterator[bytes]]


class TokenInClearWarning(UserWarning):
    """A token travels over plain HTTP to another machine: whoever is in between can read it."""


class Transport:
    """One service, found again whenever a connection fails.

    ``timeout`` is seconds for one request (a connection is given up after ten); ``retry_for`` seconds over all tries of one
    call. ``token`` is sent as bearer token to the server it belongs to (``discovery.Target``), to no other.
    """

    def __init__(
        self,
        server: str | None,
        home: str | os.PathLike[str] | None,
        timeout: float,
        retry_for: float,
        token: str | None = None,
    ) -> None:
        self._given = server, home, token
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT))
        self._patient = httpx.Timeout(timeout, connect=self._timeout.connect, read=max(timeout, _TAKEN))
        self.retry_for = retry_for
        self._reached = False
        self._clients: dict[tuple[bool, bool], httpx.Client] = {}

    @cached_property
    def target(self) -> Target:
        """What the first request found; the configuration is not read again. Raises ``Refused``."""
        return find_target(*self._given)

    def place(self) -> str:
        """The server's address, or the run directory whose service is looked for; nothing is asked. Raises ``Refused``."""
        return (self.target.server or self.target.home).value

    def _authorization(self, url: str) -> dict[str, str]:
        token = self.target.token_for(url)
        if token is None:
            return {}
        if url.startswith("http:") and not is_loopback(url):
            text = f"the token goes to {url} in clear: use https, or a tunnel to this machine"
            warnings.warn(text, TokenInClearWarning, stacklevel=1)  # one place: told once
        return {"Authorization": f"Bearer {token}"}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def request(self, method: str, path: str, *, params: Params | None = None, json: Any = None,
                idempotency_key: str | None = None, body: Body | None = None) -> httpx.Response:  # fmt: skip
        """The answer, 2xx. ``body``: instead of ``json``. Raises the service's problem as an exception of the tree, or
        ``ServiceUnreachable``, and what making the body raises."""
        headers = {}
        if body is not None:
            headers = {"Content-Type": body.media_type, "Content-Length": str(body.size)}
        if method == "POST":
            headers["Idempotency-Key"] = idempotency_key or str(uuid.uuid4())
        end = time.monotonic() + self.retry_for
        delay = _FIRST_DELAY
        while True:
            outcome = self._once(method, path, params, json, headers, body)
            if isinstance(outcome, httpx.Response) and not _worth_repeating(outcome):
                if outcome.is_success:
                    return outcome
                raise error_of(outcome)
            if time.monotonic() >= end or not self._may_repeat(method, outcome):
                raise error_of(outcome) if isinstance(outcome, httpx.Response) else outcome
            time.sleep(min(delay * random.uniform(0.5, 1.0), max(0.0, end - time.monotonic())))
            delay = min(delay * 2, _LONGEST_DELAY)

    @contextmanager
    def stream(
        self, path: str, params: Params | None, headers: Mapping[str, str], read: float = 60.0
    ) -> Iterator[httpx.Response]:
        """An open answer to read piece by piece; ``read``: seconds without a byte, long, since the service sends comments while
        idle."""
        url = self.target.url()
        timeout = httpx.Timeout(self._timeout.connect, read=read)
        headers = {**headers, **self._authorization(url)}
        try:
            with self._client(url).stream(
                "GET", url + path, params=_clean(params), headers=headers, timeout=timeout
            ) as response:
                _refuse_stranger(response)
                self._reached = True
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(url, error) from error

    def _client(self, url: str) -> httpx.Client:
        """Made when first needed: certificates, which take longest, are read only where they may matter."""
        secure, local = url.startswith("https:"), is_loopback(url)
        if (secure, local) not in self._clients:
            # A proxy of the environment would break a service on this machine; elsewhere it is wanted.
            self._clients[secure, local] = httpx.Client(
                timeout=self._timeout, trust_env=not local, verify=self._authorities() if secure else not local,
                headers={"User-Agent": f"ratchet-client/{RATCHET_VERSION}"},
            )  # fmt: skip
        return self._clients[secure, local]

    def _authorities(self) -> ssl.SSLContext | bool:
        """By which a server is known: those of the variable, those that the service left in the run directory, else the system's.
        Raises ``Refused``."""
        given = os.environ.get(environment.CA_FILE)
        file = Path(given) if given else HomePaths(Path(self.target.home.value)).service_authorities
        if not given and (self.target.server is not None or not file.exists()):
            return True
        try:
            return ssl.create_default_context(cafile=file)
        except (OSError, ValueError) as error:
            text = f"the authorities in {file} cannot be used ({error}): it holds certificates as PEM ({environment.CA_FILE})"
            raise Refused(text, code="invalid-config") from None

    def _once(self, method: str, path: str, params: Params | None, json: Any, headers: dict[str, str],
              body: Body | None) -> httpx.Response | ServiceUnreachable:  # fmt: skip
        try:
            url = self.target.url()
        except ServiceUnreachable as error:
            return error
        headers = headers | self._authorization(url)
        try:
            response = self._client(url).request(
                method, url + path, params=_clean(params), json=json, headers=headers,
                content=None if body is None else body.parts(),
                timeout=self._timeout if body is None else self._patient,
            )  # fmt: skip
            _refuse_stranger(response)
            self._reached = True
            return response
        except httpx.TransportError as error:
            return self._unreachable(url, error)
        except httpx.InvalidURL as error:
            raise Refused(f"server address {url!r} is not valid: {error}", code="invalid-address") from None

    def _may_repeat(self, method: str, outcome: httpx.Response | ServiceUnreachable) -> bool:
        """A service that was never there is not waited for. A DELETE that may have arrived is not repeated: the second
        answer (404) would say something untrue of the first."""
        if isinstance(outcome, httpx.Response):
            return method != "DELETE"
        if outcome.code == NEVER_STARTED and not self._reached:
            return False
        return method != "DELETE" or not outcome.extra.get("sent", False)

    def _strange(self, error: httpx.TransportError) -> bool:
        """Whether something else than a service that was killed in the middle of its answer may be at the address."""
        return isinstance(error, httpx.RemoteProtocolError) and self.target.server is not None and not self._reached

    def _unreachable(self, url: str, error: httpx.TransportError) -> ServiceUnreachable:
        sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        what = str(error) or type(error).__name__
        if "WRONG_VERSION_NUMBER" in what:
            cure = f"it speaks plain HTTP there: write http://{url.removeprefix('https://')}"
        elif self._strange(error) and url.startswith("http:"):
            cure = f"what listens there does not speak HTTP: check the address, or write https://{url.removeprefix('http://')}"
        elif is_loopback(url):
            cure = f"service not running? {self.target.start_it()}"
        else:
            cure = "check the address and the network, and that the service runs there"
        return ServiceUnreachable(f"no answer from {url} ({what}): {cure}", sent=sent)


def _refuse_stranger(response: httpx.Response) -> None:
    """A service of another protocol, or something else that answers at this address. Raises ``Refused``, ``ServiceFault``."""
    protocol = response.headers.get(PROTOCOL_HEADER)
    address = str(response.request.url.copy_with(path="/", query=None)).rstrip("/")
    if protocol is not None and protocol != str(PROTOCOL_VERSION):
        raise other_protocol(f"the service at {address}", protocol)
    if protocol is None and response.is_success:  # every answer of the API names it
        raise no_service(response)


def _worth_repeating(response: httpx.Response) -> bool:
    if response.status_code in _RETRY_STATUS:
        return True
    # A try whose answer was lost may still be at work: the same key is refused until it is done.
    return response.status_code == 409 and error_of(response).code == "idempotency-in-progress"
