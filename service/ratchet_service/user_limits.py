"""What all jobs of a user of their own may take of the machine: ``--run-as-limits processes=NUMBER,file_size=SIZE``.

The service's to say and not a spec's: the kernel counts processes (RLIMIT_NPROC) by user, over all jobs that run as it, and who
wants a limit against others' jobs does not leave it to them. Processes are bounded without being asked for: a job that forks
without an end must leave the service, and who looks after the machine, processes to be started.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ratchet_contract.spec_base import Size, size_in_bytes
from ratchet_service.confined import Limits, User
from ratchet_service.listening import StartError

_OPTION: Final = "--run-as-limits"
_LEAST_PROCESSES: Final = 16
"""An agent with one rank: torch's threads alone are more, so this only catches a slip."""
_LEAST_FILE: Final = 1 << 20
_SIZE: Final = TypeAdapter[str](Size)
_MACHINE: Final = (Path("/proc/sys/kernel/pid_max"), Path("/proc/sys/kernel/threads-max"))
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def parse(text: str) -> Limits:
    """Of the option's text; what is not named is None. Raises ``ValueError`` with a sentence for people."""
    limits = Limits()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name == "processes" and value.isascii() and value.isdigit() and int(value) >= _LEAST_PROCESSES:
            limits = replace(limits, processes=int(value))
        elif name == "file_size" and (size := _bytes(value)) is not None and size >= _LEAST_FILE:
            limits = replace(limits, file_size=size)
        else:
            raise ValueError(
                f"{part!r} is no limit: processes=NUMBER (at least {_LEAST_PROCESSES}, threads counted) or file_size=SIZE (like "
                "100Gi, at least 1Mi)"
            )
    return limits


def settled(limits: Limits, user: User | None) -> Limits:
    """``limits`` with a bound of processes, given or not. Raises ``StartError`` without a user of the jobs' own, and for what
    this machine does not allow."""
    if user is None:
        if limits != Limits():
            raise StartError(
                f"{_OPTION} needs --run-as: the kernel counts processes by user, and the service's own would be counted with "
                "those of jobs"
            )
        return limits
    for name, kind in (("processes", resource.RLIMIT_NPROC), ("file_size", resource.RLIMIT_FSIZE)):
        wanted, (_, most) = getattr(limits, name), resource.getrlimit(kind)
        if wanted is not None and most != resource.RLIM_INFINITY and wanted > most:
            raise StartError(f"{_OPTION} {name}={wanted}: the service itself may have {most} at the most")
    if limits.processes is None:
        return replace(limits, processes=max(_LEAST_PROCESSES, most_processes() // 2))
    return limits


def most_processes(cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> int:
    """That this process and all beside it may come to: by the kernel, by its control group and those above, by its own limit.
    Raises ``StartError`` where nothing tells."""
    found = list(_of_machine())
    found += _of_groups(cgroup, cgroups)
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    found += [] if hard == resource.RLIM_INFINITY else [hard]
    if not found:
        raise StartError(f"nothing tells how many processes this machine allows: say {_OPTION} processes=NUMBER")
    return min(found)


def _of_machine() -> Iterator[int]:
    """A container may hide either file; then what else there is counts."""
    for path in _MACHINE:
        with suppress(OSError, ValueError):
            yield int(path.read_text())


def _of_groups(cgroup: Path, cgroups: Path) -> Iterator[int]:
    """``pids.max`` of the group of this process and of those above it; of both kinds of hierarchy."""
    with suppress(OSError):
        for line in cgroup.read_text().splitlines():
            number, controllers, place = line.split(":", 2)
            if number == "0" or "pids" in controllers.split(","):
                top = cgroups if number == "0" else cgroups / "pids"
                folder = top / place.lstrip("/")
                for group in (folder, *folder.parents):
                    if not group.is_relative_to(top):
                        break
                    with suppress(OSError, ValueError):  # the root has none; "max" is none
                        yield int((group / "pids.max").read_text())


def _bytes(text: str) -> int | None:
    try:
        return size_in_bytes(_SIZE.validate_python(text))
    except ValidationError:
        return None
