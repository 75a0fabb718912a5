"""Where the service listens, who needs a token there, and TLS. An address that other machines can reach needs TLS or
``--insecure-http``, since anybody on the network can read a token sent in clear."""

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

from ratchet_service.errors import StartError

FIRST_TOKEN: Final = "python -m ratchet_service token create --owner NAME --role admin"


@dataclass(frozen=True)
class Listening:
    """Where and how the service listens. ``port`` 0: a free port. ``url``: the service's URL for agents and clients; None: the
    bound address. ``auth`` ``token``: always require tokens; ``auto``: only where ``requires_tokens`` says so. ``insecure_http``:
    allow other machines to connect without TLS, such as a proxy that terminates TLS."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None
    auth: Literal["auto", "token"] = "auto"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ca_file: Path | None = None
    insecure_http: bool = False

    def check(self) -> None:
        """Raise ``StartError`` for options that contradict each other or cannot be used, such as an exposed ``host`` without
        TLS."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartError("TLS needs both --tls-cert and --tls-key")
        if self.tls_cert is None:
            if not self.insecure_http and not is_loopback(self.host):
                raise StartError(
                    f"{self.host} can be reached from other machines, and tokens would be sent there unencrypted: set "
                    "--tls-cert and --tls-key, or --insecure-http where a proxy in front of it terminates TLS, or keep "
                    "127.0.0.1"
                )
        elif self.insecure_http:
            raise StartError(
                "--insecure-http means that a proxy terminates TLS, --tls-cert that the service does: set only one"
            )
        elif self.url is None:
            raise StartError(
                "with --tls-cert the service needs --url https://NAME:PORT, with a name in the certificate: agents connect "
                "to it there, and verify the name"
            )
        if self.url is not None:
            self._check_url(self.url)
        if self.ca_file is not None:
            read_ca_certificates(self.ca_file)

    def _check_url(self, url: str) -> None:
        """Raise ``StartError`` unless ``url`` is an HTTP or HTTPS URL with a host and without a user name. With ``tls_cert`` it
        must be HTTPS."""
        text = f"--url {url!r} must be like https://ratchet.example.com or http://host:8000"
        try:
            parts = urlsplit(url)
        except ValueError:  # such as for an IPv6 address without its end
            raise StartError(text) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise StartError(text)
        if self.tls_cert is not None and parts.scheme != "https":
            raise StartError(f"with --tls-cert agents connect by https, not to --url {url}")

    def requires_tokens(self, is_sqlite: bool) -> bool:
        """True if every caller needs a token: ``auth`` is ``token``, the database is not SQLite, or the service
        ``is_exposed``."""
        return self.auth == "token" or not is_sqlite or self.is_exposed

    @property
    def is_exposed(self) -> bool:
        """True if other machines can reach the service: ``host``, or the host in ``url``, is not a loopback address."""
        named = None if self.url is None else urlsplit(self.url).hostname
        return not is_loopback(self.host) or (named is not None and not _is_loopback_name(named))

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the server; None if no certificate is configured. Raises ``StartError`` for unusable
        files."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password=_refuse_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise StartError(
                f"--tls-cert {self.tls_cert} with --tls-key {self.tls_key} cannot be used: {error}: both must be PEM, the "
                "certificate with its intermediate certificates, the key without a password"
            ) from None
        return context

    def service_url(self, bound: socket.socket) -> str:
        """Return the URL at which agents and clients reach the service: ``url``, or the address of the socket ``bound``
        (loopback if that listens on all addresses)."""
        if self.url is not None:
            return self.url
        host, port = bound.getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            host = "127.0.0.1" if bound.family is socket.AF_INET else "::1"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextmanager
    def bind(self) -> Iterator[socket.socket]:
        """Context manager that yields the listening socket, and closes it at the end. Raises ``StartError``."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise StartError(f"{self.host!r} is not an address of this machine: {error.strerror}") from None
        with socket.socket(family, kind, protocol) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(address)
                bound.listen(socket.SOMAXCONN)
            except OSError as error:
                raise StartError(
                    f"cannot listen on {self.host} port {self.port}: {error.strerror}; end the process that uses it, or set "
                    "--port 0 for a free port"
                ) from None
            yield bound


def read_ca_certificates(file: Path) -> str:
    """Return the PEM text of ``file``. Raises ``StartError`` if it cannot be read or contains no certificate."""
    try:
        text = file.read_text(encoding="ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise StartError(f"--ca-file {file} cannot be used: {error}: it must contain certificates as PEM") from None
    return text


def is_loopback(host: str) -> bool:
    """True if all addresses of ``host``, on which a service is to listen, can be reached only from this machine. Also True if the
    name does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _is_loopback_name(name: str) -> bool:
    """True if the host of a URL is ``localhost``, ``::1`` or 127.*. The name is not resolved, since perhaps only other machines
    can resolve it."""
    return name in ("localhost", "::1") or (name.startswith("127.") and name.replace(".", "").isdigit())


def _refuse_password() -> str:
    """Raise ``ValueError``. OpenSSL calls it for a key with a password; without it, OpenSSL would prompt on the terminal."""
    raise ValueError("the key has a password")
