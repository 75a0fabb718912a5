"""Requests with retries. GET is always safe to repeat; a POST carries an Idempotency-Key, so that repeating it is safe too."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from ratchet_client.discovery import NEVER_STARTED, START_IT, find_service
from ratchet_client.errors import ServiceUnreachable, error_of
from ratchet_contract.errors import Refused
from ratchet_contract.version import RATCHET_VERSION

Params = Mapping[str, str | int | float | bool | Sequence[str | int] | None]
_RETRY_STATUS = frozenset({502, 503, 504})
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 2.0


def _clean(params: Params | None) -> dict[str, Any]:
    return {k: v for k, v in (params or {}).items() if v is not None}


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


class Transport:
    """One service, found again whenever a connection fails.

    ``timeout`` is seconds for one request; ``retry_for`` seconds over all tries of one call.
    """

    def __init__(
        self, server: str | None, home: str | os.PathLike[str] | None, timeout: float, retry_for: float
    ) -> None:
        self._server, self._home = server, home
        self._timeout, self.retry_for = timeout, retry_for
        self._reached = False
        self._clients: dict[tuple[bool, bool], httpx.Client] = {}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def request(self, method: str, path: str, *, params: Params | None = None, json: Any = None,
                idempotency_key: str | None = None) -> httpx.Response:  # fmt: skip
        """The answer, 2xx. Raises the service's problem as an exception of the tree, or ``ServiceUnreachable``."""
        headers = {}
        if method == "POST":
            headers["Idempotency-Key"] = idempotency_key or str(uuid.uuid4())
        end = time.monotonic() + self.retry_for
        delay = _FIRST_DELAY
        while True:
            outcome = self._once(method, path, params, json, headers)
            if isinstance(outcome, httpx.Response) and not _worth_repeating(outcome):
                if outcome.is_success:
                    return outcome
                raise error_of(outcome)
            if time.monotonic() >= end or not self._may_repeat(method, outcome):
                raise error_of(outcome) if isinstance(outcome, httpx.Response) else outcome
            time.sleep(min(delay * random.uniform(0.5, 1.0), max(0.0, end - time.monotonic())))
            delay = min(delay * 2, _LONGEST_DELAY)

    @contextmanager
    def stream(self, path: str, params: Params | None, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """An open answer to read line by line; the read timeout is long, since the service sends comments while idle."""
        url = find_service(self._server, self._home)
        timeout = httpx.Timeout(self._timeout, read=60.0)
        try:
            with self._client(url).stream(
                "GET", url + path, params=_clean(params), headers=dict(headers), timeout=timeout
            ) as response:
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
                timeout=self._timeout, trust_env=not local, verify=secure or not local,
                headers={"User-Agent": f"ratchet-client/{RATCHET_VERSION}"},
            )  # fmt: skip
        return self._clients[secure, local]

    def _once(self, method: str, path: str, params: Params | None, json: Any,
              headers: dict[str, str]) -> httpx.Response | ServiceUnreachable:  # fmt: skip
        try:
            url = find_service(self._server, self._home)
        except ServiceUnreachable as error:
            return error
        try:
            response = self._client(url).request(method, url + path, params=_clean(params), json=json, headers=headers)
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

    def _unreachable(self, url: str, error: httpx.TransportError) -> ServiceUnreachable:
        sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        what = str(error) or type(error).__name__
        hint = START_IT if is_loopback(url) else "check the address and the network"
        return ServiceUnreachable(f"no answer from {url} ({what}): service not running? {hint}", sent=sent)


def _worth_repeating(response: httpx.Response) -> bool:
    if response.status_code in _RETRY_STATUS:
        return True
    # A try whose answer was lost may still be at work: the same key is refused until it is done.
    return response.status_code == 409 and error_of(response).code == "idempotency-in-progress"
