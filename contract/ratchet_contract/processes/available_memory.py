"""The memory that processes of this machine can still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def available(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that are available on this machine or, if that is less, in this process's control group (version
    2) and those above it. None: not known."""
    found = [*_of_cgroups(cgroup, cgroups)]
    with suppress(OSError, KeyError, ValueError):
        found.append(1024 * int(_fields(meminfo)["MemAvailable:"]))
    return min(found, default=None)


def _of_cgroups(cgroup: Path, cgroups: Path) -> Iterator[int]:
    """Yield the bytes that are left below the limit of each control group that has one."""
    with suppress(OSError):
        places = [line.split(":", 2)[2] for line in cgroup.read_text().splitlines() if line.startswith("0:")]
        for folder in (cgroups / place.lstrip("/") for place in places):
            for group in (folder, *folder.parents):
                if not group.is_relative_to(cgroups):
                    break
                with suppress(OSError, KeyError, ValueError):  # the root group has no limit; "max" means none
                    most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
                    yield max(0, most - used + int(_fields(group / "memory.stat")["inactive_file"]))


def _fields(file: Path) -> dict[str, str]:
    """Return the first value of each line, by its name. Raises ``OSError``."""
    return {line.split()[0]: line.split()[1] for line in file.read_text().splitlines() if len(line.split()) > 1}
