"""The address at which other nodes reach this node, and ``host:port`` for both address families. Linux only."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_IFF_UP: Final = 0x1
_OFFSETS: Final = {
    socket.AF_INET: (4, 4),
    socket.AF_INET6: (8, 16),
}  # offset and size in bytes of the address in sockaddr_in and sockaddr_in6


class NoAddress(Exception):
    """Raised if this node has no address that the others could use. The message says why."""


class Place(NamedTuple):
    """An address of this node, and the interface that has it."""

    address: str
    interface: str


class _Entry(ctypes.Structure):
    """``struct ifaddrs``."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface that is up, IPv4 first, without link-local ones. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: dict[str, list[str]] = {}
    try:
        entry: Any = head
        while entry:
            name, address = entry.contents.name.decode(), _address(entry.contents.address)
            if entry.contents.flags & _IFF_UP:
                known = found.setdefault(name, [])
                if address is not None and not ipaddress.ip_address(address).is_link_local:
                    known.append(address)
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(head)
    return {name: sorted(known, key=lambda a: ":" in a) for name, known in found.items()}


def _address(pointer: int | None) -> str | None:
    """Return the address in the ``sockaddr`` at ``pointer`` as text; None unless it is IPv4 or IPv6."""
    if not pointer:
        return None
    family = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ushort))[0]
    if family not in _OFFSETS:
        return None
    offset, size = _OFFSETS[socket.AddressFamily(family)]
    return socket.inet_ntop(family, ctypes.string_at(pointer + offset, size))


def find_node_address(
    interface: str | None, launcher_address: str | None, service_address: Callable[[], tuple[str, int]]
) -> Place:
    """Return the address at which other nodes reach this node, and its interface. The address is that of ``interface``, if
    given, else ``launcher_address``. Without both, it is the local address of the route to the service. Raises ``NoAddress``,
    ``OSError``, and what ``service_address`` raises."""
    here = interfaces()
    if interface is not None:
        if interface not in here:
            raise NoAddress(
                f"this node ({socket.gethostname()}) has no interface {interface} that is up; it has {_format_interfaces(here)}"
            )
        if not here[interface]:
            raise NoAddress(f"the interface {interface} of this node ({socket.gethostname()}) has no address")
        return Place(here[interface][0], interface)
    address = _resolve(launcher_address) if launcher_address is not None else _route_address(*service_address())
    holder = next((name for name, known in here.items() if address in known), None)
    if holder is None:
        raise NoAddress(
            f"the address {address} of this node is at none of its interfaces, which are {_format_interfaces(here)}"
        )
    return Place(address, holder)


def _format_interfaces(addresses: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(known) or 'no address'})" for name, known in sorted(addresses.items()))


def _resolve(host: str) -> str:
    """The numeric address of ``host``, IPv4 preferred. Raises ``NoAddress``."""
    try:
        return str(_candidates(host, 0)[0][4][0])
    except OSError as error:
        raise NoAddress(
            f"the address {host!r} that the launcher specifies cannot be resolved on this node: {error}"
        ) from None


def _route_address(host: str, port: int) -> str:
    """The local address of the route to ``host``. No packet is sent, except to resolve a name. Raises ``NoAddress``."""
    reason: OSError | None = None
    try:
        for family, kind, protocol, _, target in _candidates(host, port):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(target)
                    return str(probe.getsockname()[0]).partition("%")[0]
            except OSError as error:
                reason = error
    except OSError as error:
        reason = error
    raise NoAddress(f"this node ({socket.gethostname()}) has no route to the service at {host}: {reason}")


def _candidates(host: str, port: int) -> list[Any]:
    """Return the entries of ``getaddrinfo`` for ``host``, IPv4 first, so that all nodes prefer the same family. Raises
    ``OSError``."""
    return sorted(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM), key=lambda info: info[0] != socket.AF_INET)


def format_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_host_port(text: str) -> tuple[str, int]:
    """Split ``host:port``, as ``format_host_port`` writes it, into host (without brackets) and port. Raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address with a port is written [address]:port")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def listen(address: str, backlog: int) -> socket.socket:
    """A listening socket at ``address`` on a port that the kernel chooses. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def connection_error(address: str, seconds: float) -> str | None:
    """Test the connection to ``address`` (``host:port``). Returns None on success, else text on why none was made within
    ``seconds``."""
    try:
        socket.create_connection(parse_host_port(address), timeout=seconds).close()
    except OSError as error:
        return error.strerror or os.strerror(error.errno or 0) if error.errno else str(error)
    return None
