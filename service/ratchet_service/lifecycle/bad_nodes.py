"""Decides which nodes a job's next attempt stays away from, by the ends of its attempts. Pure."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from ratchet_contract.phases import Cause

FAULT_WINDOW: Final = timedelta(hours=24)
"""A fault counts for this long."""
MIN_FAULTS: Final = 2
MAX_EXCLUDED: Final = 3
"""Most nodes that one attempt stays away from."""

_DEVICE_ERROR: Final = re.compile(
    r"uncorrectable|ECC error|\bXid\b|hardware (error|fault|stack)|fallen off the bus|GPU is lost|initialize NVML|"
    r"No CUDA GPUs|CUDA initialization|CUDA-capable device|unhandled system error|ncclSystemError",
    re.IGNORECASE,
)
"""Messages of CUDA and NCCL that the program alone rarely causes. An illegal memory access, an unspecified launch failure, a
failed assertion on the device or a lack of memory is mostly the program's."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
"""The job's code may have changed the file that the name is read from, and the name becomes part of a request to the engine."""

FaultKind = Literal["node-lost", "agent-lost", "hang", "sigbus", "device-error"]


@dataclass(frozen=True)
class NodeFault:
    """An end of an attempt by a fault that may be the hardware's. ``host``: the node that caused the end."""

    attempt: int
    host: str
    at: datetime
    kind: FaultKind


@dataclass(frozen=True)
class Exclusion:
    """A node to stay away from until ``until``. ``faults``: those that count, the oldest first."""

    host: str
    faults: tuple[NodeFault, ...]
    until: datetime

    def sentence(self) -> str:
        """Return the event's message."""
        ends = ", ".join(f"{fault.kind} in attempt {fault.attempt}" for fault in self.faults)
        return (
            f"node {self.host} is not used before {self.until:%Y-%m-%d %H:%M} UTC, after {ends} (policy.exclude_nodes)"
        )


def blamed_node(cause: Cause, node: int | None, nodes: int) -> int | None:
    """Return the node that caused the end of an attempt on ``nodes`` nodes; None if unknown. ``node``: the one that ended first.
    If one node hangs, the others hang too, in a collective, and any of them may be the first to notice."""
    if nodes == 1:
        return 0
    return None if cause is Cause.HANG else node


def fault_kind(cause: Cause | None, rank: int | None, exit_code: int | None, message: str | None) -> FaultKind | None:
    """Return which fault of the hardware an attempt's end may be; None: the end is the program's, the user's or the engine's.
    ``rank``: the rank that caused the end."""
    if cause is Cause.NODE_LOST:
        return "node-lost"
    if cause is Cause.UNKNOWN:
        return "agent-lost"
    if cause is Cause.HANG and rank is not None:
        return "hang"
    if cause is Cause.RANK_KILLED and exit_code == -signal.SIGBUS:
        return "sigbus"
    if cause is Cause.EXCEPTION and _DEVICE_ERROR.search(message or ""):
        return "device-error"
    return None


def excluded_nodes(
    faults: Iterable[NodeFault], machines: Collection[str], nodes: int, now: datetime
) -> list[Exclusion]:
    """Return the nodes that the next attempt stays away from, those with most faults first. ``machines``: hosts on which such a
    job could start, as far as known; ``nodes`` of them always remain."""
    by_host: dict[str, list[NodeFault]] = defaultdict(list)
    for fault in sorted(faults, key=lambda fault: (fault.at, fault.attempt)):
        if now - FAULT_WINDOW < fault.at <= now and _NAME.fullmatch(fault.host):
            by_host[fault.host].append(fault)
    found = [
        Exclusion(host, tuple(of_host), of_host[-MIN_FAULTS].at + FAULT_WINDOW)
        for host, of_host in by_host.items()
        if len(of_host) >= MIN_FAULTS
    ]
    found.sort(key=lambda one: (-len(one.faults), -one.faults[-1].at.timestamp(), one.host))
    free = len({*machines, *by_host}) - nodes
    return found[: max(0, min(MAX_EXCLUDED, free))]
