"""How the agents of several nodes meet before any rank is started: each tells the service where it is, and is told by it when all
are there and where node 0 listens. The service may be away meanwhile; whoever comes late is waited for until the deadline.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeVar

from ratchet_contract.errors import UserError
from ratchet_contract.messages import Group, LaunchFile
from ratchet_contract.phases import Cause
from ratchet_worker import addresses
from ratchet_worker.files import say
from ratchet_worker.results import Conclusion, NotStarted
from ratchet_worker.service_link import ServiceLink, Unreachable

T = TypeVar("T")
_LOOPBACK: Final = "127.0.0.1"
_CONNECT_SECONDS: Final = 1.0


class Patience(Protocol):
    """Waits for ``done`` to give a value; None when the time for a start is over. Raises ``NotStarted`` when the attempt is."""

    def __call__(self, done: Callable[[], T | None]) -> T | None: ...


class Rendezvous(NamedTuple):
    """Where the ranks' store is. ``interface``: this node's, for what ranks say to one another; ``listener``: on node 0."""

    host: str
    port: int
    interface: str
    listener: socket.socket | None


def alone(world_size: int) -> Rendezvous:
    """Of a job with one node: on the loopback interface."""
    listener = addresses.listen(_LOOPBACK, _backlog(world_size))
    return Rendezvous(_LOOPBACK, listener.getsockname()[1], "lo", listener)


class Meeting:
    """One node's part. ``address`` and ``heard`` are the uplink's, which is another thread."""

    def __init__(self, launch: LaunchFile) -> None:
        self._launch = launch
        self._nodes = launch.spec.world.nodes
        self._deadline = f"startup_deadline ({launch.deadlines.meeting:g} s)"
        self._group: Group | None = None
        self._refused: str | None = None
        self.address: str | None = None

    def heard(self, group: Group) -> None:
        if self._group is None or group.present != self._group.present:
            say(f"here is {_list(group.present)} of {self._nodes}")
        self._group = group

    def attend(self, told: str | None, patience: Patience, report: Callable[[], None]) -> Rendezvous:
        """Wait for the other nodes. ``told``: this node's address, if its launcher knows it; ``report`` begins to report.

        Raises ``NotStarted`` (launcher-error) when a node has not come in time, ``UserError`` for an interface that is not there.
        """
        place = self._place(told, patience)
        listener = (
            addresses.listen(place.address, _backlog(self._launch.world_size)) if self._launch.node == 0 else None
        )
        try:
            self.address = addresses.join(place.address, listener.getsockname()[1] if listener is not None else 0)
            say(f"node {self._launch.node} is at {self.address} ({place.interface})")
            report()
            rendezvous = patience(self._complete)
            if rendezvous is None:
                raise self._in_vain(self._who_is_missing())
            if listener is None and patience(lambda: self._reaches(rendezvous)) is None:
                raise self._in_vain(
                    f"node {self._launch.node} cannot reach node 0 at {rendezvous}: {self._refused}. Look at firewalls and "
                    "network policies between the nodes, and whether world.interface names the network that joins them"
                )
            return Rendezvous(*addresses.split(rendezvous), place.interface, listener)
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    def _place(self, told: str | None, patience: Patience) -> addresses.Place:
        link, wanted = ServiceLink(self._launch), self._launch.spec.world.interface

        def find() -> addresses.Place | None:
            try:
                return addresses.node_place(wanted, told, link.address)
            except Unreachable as error:
                self._refused = str(error)
                return None

        try:
            place = patience(find)
        except addresses.NoAddress as error:
            if wanted is not None:
                raise UserError(f"world.interface: {error}") from None
            raise self._in_vain(str(error)) from None
        if place is None:
            raise self._in_vain(f"no service was found within {self._deadline}: {self._refused}")
        return place

    def _complete(self) -> str | None:
        """Where node 0 listens, once all are there."""
        group = self._group
        return group.rendezvous if group is not None and set(group.present) >= set(range(self._nodes)) else None

    def _reaches(self, rendezvous: str) -> bool | None:
        self._refused = addresses.can_reach(rendezvous, _CONNECT_SECONDS)
        return self._refused is None or None

    def _who_is_missing(self) -> str:
        if self._group is None:
            return (
                f"the service did not answer node {self._launch.node} within {self._deadline}, so it does not know where the "
                "other nodes are: look whether the service runs, and whether this node reaches it"
            )
        there = sorted({*self._group.present, self._launch.node})
        missing = [node for node in range(self._nodes) if node not in there]
        return (
            f"{_list(missing)} of {self._nodes} did not come within {self._deadline}; {_list(there)} did. Look whether the "
            "engine has started the missing ones, what their agents' logs say, and whether they reach the service; where nodes "
            "start at very different times, policy.startup_deadline may be too short"
        )

    def _in_vain(self, text: str) -> NotStarted:
        return NotStarted(Conclusion(Cause.LAUNCHER_ERROR, None, None, text))


def _backlog(world_size: int) -> int:
    return max(128, 4 * world_size)


def _list(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes)) or 'none'}"
