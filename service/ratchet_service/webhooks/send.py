"""One HTTP request to a webhook's URL. A URL may come from anyone who administers the service, so it must not reach the service's
own network: each address is checked when it is connected to, after the last look-up of the name."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, NamedTuple

import httpcore

from ratchet_service.config.settings import Network

DEADLINE: Final = 10.0
"""Seconds for a whole delivery: look-up, connection, request and answer."""
_MAX_ANSWER: Final = 16 * 1024
"""Bytes of an answer's body that are read at most; the rest is not needed."""
_PART: Final = 4096
"""Bytes of a request that are written at once."""
_ADDRESS_SECONDS: Final = 3.0
"""For a connection to an address that is not the last of its name."""
_UNICAST_IPV6: Final = IPv6Network("2000::/3")
_SPECIAL: Final = tuple(
    ip_network(text)
    for text in (
        "192.0.0.0/24", "192.88.99.0/24", "168.63.129.16",  # protocols, 6to4 relays, Azure's virtual host
        "2001::/23", "2002::/16", "3fff::/20",  # protocols such as Teredo, 6to4, examples
    )
)  # fmt: skip
"""Ranges that lead to no public host, or to any IPv4 address, beyond those that ``ipaddress`` knows."""


class Answer(NamedTuple):
    """The result of a request. ``status``: of the HTTP answer, None if there was none. ``error``: None if it was accepted.
    ``retry_after``: seconds that a refusal asks for by its header ``Retry-After``; 0 without one."""

    status: int | None
    error: str | None
    retry_after: float = 0.0


class Sender:
    """Sends requests to public addresses, and to those in ``networks``."""

    def __init__(self, networks: Sequence[Network] = ()) -> None:
        self._networks = networks
        self._tls: ssl.SSLContext | None = None

    def send(self, url: str, headers: Mapping[bytes | str, bytes | str], body: bytes) -> Answer:
        """Send a POST request and return the result within ``DEADLINE`` seconds. Only a 2xx answer is an acceptance; redirects
        are not followed, and no proxy is used."""
        backend = _Backend(self._networks, time.monotonic() + DEADLINE)
        try:
            if self._tls is None and url.startswith("https:"):
                import httpx  # 25 ms of the start of a service that has no webhook

                self._tls = httpx.create_ssl_context()
            with (
                httpcore.ConnectionPool(ssl_context=self._tls, network_backend=backend) as pool,
                pool.stream("POST", url, headers=headers, content=body) as response,
            ):
                status, read, fields = response.status, 0, response.headers
                with suppress(httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError):
                    for part in response.iter_stream():
                        read += len(part)
                        if read >= _MAX_ANSWER:
                            break
        except Exception as error:  # whatever a receiver or a URL causes: it concerns this delivery alone
            return Answer(None, f"{type(error).__name__}: {error}"[:500])
        if 200 <= status < 300:
            return Answer(status, None)
        problem = "redirects are not followed" if 300 <= status < 400 else f"the answer has status {status}"
        given = next((value for name, value in fields if name.lower() == b"retry-after"), b"")
        return Answer(status, problem, _retry_after(given.decode("latin-1")))


def _retry_after(text: str) -> float:
    """Return the seconds that a header ``Retry-After`` asks for, as a number or a date (RFC 9110); 0 for any other text."""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


class _Backend(httpcore.NetworkBackend):
    """Connects only to permitted addresses, and until ``deadline`` (monotonic)."""

    def __init__(self, networks: Sequence[Network], deadline: float) -> None:
        self._networks, self._deadline = networks, deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Look ``host`` up once, and connect to its first permitted address that accepts. Raise ``httpcore.ConnectError``."""
        problem = f"{host} has no address"
        addresses = _look_up(host, port, _left(self._deadline))
        for address in addresses:
            if not is_permitted(address, self._networks):
                place = host if address == host else f"{host} is at {address}, which"
                problem = f"{place} is not public: see the service's --webhook-network"
                continue
            try:
                left = _left(self._deadline)
                seconds = left if address == addresses[-1] else min(left, _ADDRESS_SECONDS)
                stream = httpcore.SyncBackend().connect_tcp(address, port, seconds, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = f"{address}: {error}"
                continue
            return _Stream(stream, self._deadline)
        raise httpcore.ConnectError(problem)


class _Stream(httpcore.NetworkStream):
    """A connection whose every operation ends at ``deadline`` (monotonic)."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # in parts: the time of one write begins again with each byte that the receiver takes
        for begin in range(0, len(buffer), _PART):
            self._stream.write(buffer[begin : begin + _PART], _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """Encrypt. ``server_hostname``: the name in the URL, for SNI and the certificate, even though an address was dialled."""
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    """Return the seconds until ``deadline``. Raise ``httpcore.ReadTimeout`` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout(f"it took more than {DEADLINE:g} s")
    return left


def _look_up(host: str, port: int, seconds: float) -> list[str]:
    """Return the addresses of ``host``. Raise ``httpcore.ConnectError``, also if the resolver takes longer than ``seconds``."""
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else OSError(f"{host} is not a valid host name"))

    threading.Thread(target=ask, name="webhook name", daemon=True).start()  # a resolver has no deadline of its own
    try:
        answer = found.get(timeout=seconds)
    except queue.Empty:
        raise httpcore.ConnectError(f"the look-up of {host} took more than {seconds:.0f} s") from None
    if isinstance(answer, OSError):
        raise httpcore.ConnectError(f"{host}: {answer}")
    return list(dict.fromkeys(str(entry[4][0]) for entry in answer))


def is_permitted(text: str, networks: Sequence[Network]) -> bool:
    """True for the text of a public unicast address, and for one in ``networks``."""
    address: IPv4Address | IPv6Address = ip_address(text)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in networks):
        return True
    if isinstance(address, IPv6Address) and address not in _UNICAST_IPV6:
        return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _SPECIAL)
    return address.is_global and not special
