"""Where the service listens, who needs a token there, and TLS.

Embedded default: SQLite and an address of this machine alone. There nobody needs a token; everywhere else everybody does. An
address that other machines reach needs TLS, or the word that a proxy in front of it ends TLS (``--insecure-http``): a token that
travels in clear is everybody's.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

FIRST_TOKEN: Final = "python -m ratchet_service token create --owner NAME --role admin"


class StartError(Exception):
    """The service cannot start; the text says what to do."""


@dataclass(frozen=True)
class Listening:
    """``url``: what ``service.json`` tells agents, where the bound address is not how they reach it. ``ca_file``: PEM, by which
    agents know the service's certificate, where the system's authorities do not know it. ``auth`` ``token``: tokens on the
    embedded default, too."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None
    auth: Literal["auto", "token"] = "auto"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ca_file: Path | None = None
    insecure_http: bool = False

    def check(self) -> None:
        """Raises ``StartError``."""
        if self.auth not in ("auto", "token"):
            raise StartError(f"RATCHET_AUTH is auto or token, not {self.auth!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartError("TLS needs both --tls-cert and --tls-key")
        if self.tls_cert is None:
            if not self.insecure_http and not is_loopback(self.host):
                raise StartError(
                    f"{self.host} can be reached from other machines, and tokens would travel there in clear: give --tls-cert "
                    "and --tls-key, or --insecure-http where a proxy in front of it ends TLS, or keep 127.0.0.1"
                )
        elif self.insecure_http:
            raise StartError("--insecure-http says that a proxy ends TLS, --tls-cert that the service does: give one")
        elif self.url is None:
            raise StartError(
                "with --tls-cert the service needs --url https://NAME:PORT, by a name that the certificate is for: agents reach "
                "it there, and check that"
            )
        if self.url is not None:
            self._check_url(self.url)
        if self.ca_file is not None:
            read_authorities(self.ca_file)

    def _check_url(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise StartError(f"--url {url!r} must be like https://ratchet.example.com or http://host:8000")
        if self.tls_cert is not None and parts.scheme != "https":
            raise StartError(f"with --tls-cert agents reach the service by https, not by --url {url}")

    def tokens(self, embedded: bool) -> bool:
        """Whether everybody needs one. ``embedded``: the database is SQLite."""
        return self.auth == "token" or not embedded or self.open

    @property
    def open(self) -> bool:
        """Whether other machines reach it, by its address or by what is in front of it."""
        named = None if self.url is None else urlsplit(self.url).hostname
        return not is_loopback(self.host) or (named is not None and not _says_loopback(named))

    def tls(self) -> ssl.SSLContext | None:
        """Raises ``StartError`` for files that cannot be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise StartError(
                f"--tls-cert {self.tls_cert} with --tls-key {self.tls_key} cannot be used: {error}: both are PEM, the "
                "certificate with what leads to its authority, the key without a password"
            ) from None
        return context

    def address(self, bound: socket.socket) -> str:
        """How agents and clients reach it."""
        if self.url is not None:
            return self.url
        host, port = bound.getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            host = "127.0.0.1" if bound.family is socket.AF_INET else "::1"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextmanager
    def bound(self) -> Iterator[socket.socket]:
        """Bound before anything else is done, so that nobody can take the port meanwhile. Raises ``StartError``."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise StartError(f"{self.host!r} is no address of this machine: {error.strerror}") from None
        with socket.socket(family, kind, protocol) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(address)
                bound.listen(socket.SOMAXCONN)
            except OSError as error:
                raise StartError(
                    f"cannot listen on {self.host} port {self.port}: {error.strerror}; end what uses it, or give --port 0 for a "
                    "free port"
                ) from None
            yield bound


def read_authorities(file: Path) -> str:
    """The PEM text of ``--ca-file``. Raises ``StartError``."""
    try:
        text = file.read_text(encoding="ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise StartError(f"--ca-file {file} cannot be used: {error}: it holds certificates as PEM") from None
    return text


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's alone; of a name that means nothing binding says what is wrong."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _says_loopback(name: str) -> bool:
    """Of a URL, whose name may mean something elsewhere only: nobody is asked."""
    return name in ("localhost", "::1") or (name.startswith("127.") and name.replace(".", "").isdigit())


def _no_password() -> str:
    raise ValueError("the key has a password")
