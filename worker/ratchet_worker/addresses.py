"""Where the other nodes reach this one: its address, the interface that has it, and ``host:port`` for both families of addresses.

Linux (getifaddrs(3)); without torch.
"""

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
}  # of the address in sockaddr_in and sockaddr_in6, its bytes


class NoAddress(Exception):
    """This node has no address that the others could use; the sentence says what to look at."""


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
    """The addresses of each interface that is up, IPv4 before IPv6. Link-local ones are left out: without their interface they
    mean nothing to another node. Raises ``OSError``."""
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
    if not pointer:
        return None
    family = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ushort))[0]
    if family not in _OFFSETS:
        return None
    offset, size = _OFFSETS[socket.AddressFamily(family)]
    return socket.inet_ntop(family, ctypes.string_at(pointer + offset, size))


def node_place(wanted: str | None, told: str | None, service: Callable[[], tuple[str, int]]) -> Place:
    """Where this node is reached: at the interface that is ``wanted`` (of the spec), else at the address that its launcher has
    ``told``, else where its packets to the ``service`` (host, port) leave it. Raises ``NoAddress``, and what ``service`` raises.
    """
    here = interfaces()
    if wanted is not None:
        if wanted not in here:
            raise NoAddress(
                f"this node ({socket.gethostname()}) has no interface {wanted} that is up; it has {_names(here)}"
            )
        if not here[wanted]:
            raise NoAddress(f"the interface {wanted} of this node ({socket.gethostname()}) has no address")
        return Place(here[wanted][0], wanted)
    address = _resolved(told) if told is not None else _towards(*service())
    holder = next((name for name, known in here.items() if address in known), None)
    if holder is None:
        raise NoAddress(f"the address {address} of this node is at none of its interfaces, which are {_names(here)}")
    return Place(address, holder)


def _names(here: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(known) or 'no address'})" for name, known in sorted(here.items()))


def _resolved(host: str) -> str:
    try:
        return str(_candidates(host, 0)[0][4][0])
    except OSError as error:
        raise NoAddress(f"the address {host!r} that the launcher gives this node is not known to it: {error}") from None


def _towards(host: str, port: int) -> str:
    """The local address of the route to ``host``. No packet is sent."""
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
    raise NoAddress(f"this node ({socket.gethostname()}) has no way to the service at {host}: {reason}")


def _candidates(host: str, port: int) -> list[Any]:
    """IPv4 first, so that all nodes of a network that has both meet in one family. Raises ``OSError``."""
    return sorted(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM), key=lambda info: info[0] != socket.AF_INET)


def join(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(text: str) -> tuple[str, int]:
    """The two halves of ``join``. Raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address with a port is written [address]:port")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def listen(address: str, backlog: int) -> socket.socket:
    """A listening socket on a port that the kernel chooses. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def can_reach(address: str, seconds: float) -> str | None:
    """Does somebody listen at ``host:port``? None, or why the connection is not made within ``seconds``."""
    try:
        socket.create_connection(split(address), timeout=seconds).close()
    except OSError as error:
        return error.strerror or os.strerror(error.errno or 0) if error.errno else str(error)
    return None
