"""Rendezvous of the agents of several nodes, through the service, before any rank is started."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeVar

from ratchet_contract.errors import UserError
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import Group, LaunchFile
from ratchet_worker.agent import network_addresses
from ratchet_worker.agent.service_client import ServiceLink, Unreachable
from ratchet_worker.ipc.log_lines import log_message
from ratchet_worker.ipc.result_files import Conclusion, NotStarted

T = TypeVar("T")
_LOOPBACK: Final = "127.0.0.1"
_CONNECT_SECONDS: Final = 1.0


class WaitUntil(Protocol):
    """Polls ``done`` and returns its first value that is not None, or None if the time for a start has passed. Raises
    ``NotStarted`` if the attempt is over."""

    def __call__(self, done: Callable[[], T | None]) -> T | None: ...


class Rendezvous(NamedTuple):
    """The address of the rendezvous store, through which the ranks meet. ``interface``: this node's network interface.
    ``listener``: the store's listening socket; None on all nodes but node 0."""

    host: str
    port: int
    interface: str
    listener: socket.socket | None


def single_node(world_size: int) -> Rendezvous:
    """Return the rendezvous of a job with one node: a new listening socket on the loopback interface. Raises ``OSError``."""
    listener = network_addresses.listen(_LOOPBACK, _backlog(world_size))
    return Rendezvous(_LOOPBACK, listener.getsockname()[1], "lo", listener)


class NodeRendezvous:
    """One node's part of the rendezvous. ``address``: this node's ``host:port``, None before it is known."""

    def __init__(self, launch: LaunchFile) -> None:
        self._launch = launch
        self._nodes = launch.spec.world.nodes
        self._deadline_text = f"startup_deadline ({launch.deadlines.rendezvous:g} s)"
        self._group: Group | None = None
        self._last_error: str | None = None
        self.address: str | None = None

    def on_group(self, group: Group) -> None:
        """Receive from the service which nodes are present, and where node 0 listens."""
        if self._group is None or group.present != self._group.present:
            log_message(f"present: {_format_nodes(group.present)} of {self._nodes}")
        self._group = group

    def join(
        self, launcher_address: str | None, wait_until: WaitUntil, start_reports: Callable[[], None]
    ) -> Rendezvous:
        """Wait until all nodes are present and node 0 can be reached; return the rendezvous. ``launcher_address``: this node's,
        if its launcher knows it. Raises ``NotStarted`` if the nodes cannot meet or the attempt is over, ``UserError`` for an
        unusable ``world.interface``, and ``OSError``."""
        place = self._find_address(launcher_address, wait_until)
        listener = (
            network_addresses.listen(place.address, _backlog(self._launch.world_size))
            if self._launch.node == 0
            else None
        )
        try:
            self.address = network_addresses.format_host_port(
                place.address, listener.getsockname()[1] if listener is not None else 0
            )
            log_message(f"node {self._launch.node} is at {self.address} ({place.interface})")
            start_reports()
            rendezvous = wait_until(self._store_address)
            if rendezvous is None:
                raise self._launcher_error(self._describe_missing())
            if listener is None and wait_until(lambda: self._can_reach(rendezvous)) is None:
                raise self._launcher_error(
                    f"node {self._launch.node} cannot reach node 0 at {rendezvous}: {self._last_error}. Check firewalls and "
                    "network policies between the nodes, and that world.interface names the network that connects them"
                )
            return Rendezvous(*network_addresses.parse_host_port(rendezvous), place.interface, listener)
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    def _find_address(self, launcher_address: str | None, wait_until: WaitUntil) -> network_addresses.Place:
        """Return this node's address and interface; may wait until the service's address is known. Raises ``NotStarted``,
        ``UserError`` or ``OSError``."""
        link, wanted = ServiceLink(self._launch), self._launch.spec.world.interface

        def find() -> network_addresses.Place | None:
            """Try once; None while the service's address is not known."""
            try:
                return network_addresses.find_node_address(wanted, launcher_address, link.address)
            except Unreachable as error:
                self._last_error = str(error)
                return None

        try:
            place = wait_until(find)
        except network_addresses.NoAddress as error:
            if wanted is not None:
                raise UserError(f"world.interface: {error}") from None
            raise self._launcher_error(str(error)) from None
        if place is None:
            raise self._launcher_error(f"no service was found within {self._deadline_text}: {self._last_error}")
        return place

    def _store_address(self) -> str | None:
        """The address ``host:port`` at which node 0 listens, once all nodes are present; None before."""
        group = self._group
        return group.rendezvous if group is not None and set(group.present) >= set(range(self._nodes)) else None

    def _can_reach(self, rendezvous: str) -> bool | None:
        """True if a connection to ``rendezvous`` (``host:port``) succeeds, else None, with the reason in ``_last_error``."""
        self._last_error = network_addresses.connection_error(rendezvous, _CONNECT_SECONDS)
        return self._last_error is None or None

    def _describe_missing(self) -> str:
        """Return the error text for a rendezvous that was not complete in time."""
        if self._group is None:
            return (
                f"the service did not answer node {self._launch.node} within {self._deadline_text}, so it does "
                "not know where the "
                "other nodes are: check whether the service runs, and whether this node reaches it"
            )
        there = sorted({*self._group.present, self._launch.node})
        missing = [node for node in range(self._nodes) if node not in there]
        return (
            f"{_format_nodes(missing)} of {self._nodes} did not join within {self._deadline_text}; "
            f"{_format_nodes(there)} did. Check whether the "
            "engine has started the missing ones, what their agents' logs show, and whether they reach the service; where nodes "
            "start at very different times, policy.startup_deadline may be too short"
        )

    def _launcher_error(self, text: str) -> NotStarted:
        """A ``NotStarted`` with the cause launcher-error and the message ``text``, for the caller to raise."""
        return NotStarted(Conclusion(Cause.LAUNCHER_ERROR, None, None, text))


def _backlog(world_size: int) -> int:
    """The length of the listening socket's queue, enough for several connections of each rank."""
    return max(128, 4 * world_size)


def _format_nodes(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes)) or 'none'}"
