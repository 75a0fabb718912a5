"""Checks the machine: packages, cores, memory, limits, clock. Changes nothing."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from ratchet_contract import env_vars
from ratchet_contract.doctor.findings import Finding, failed, not_checked, ok, warning
from ratchet_contract.doctor.installed_packages import required_packages
from ratchet_contract.plural import pluralize

BUILD_YEAR: Final = 2026
"""Ratchet did not exist before this year: a clock with an earlier one is wrong."""
MIN_OPEN_FILES: Final = 1024
MIN_PROCESSES: Final = 512
MIN_MEMORY: Final = 2 << 30
MIN_SHARED: Final = 256 << 20  # container engines provide 64 MiB by default
_TIME_ERROR: Final = 5
_STA_UNSYNC: Final = 0x40
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def installation() -> list[Finding]:
    """Return findings on this interpreter and the packages that the service needs."""
    version = platform.python_version()
    found = [ok("python", version, sys.executable)]
    try:
        return [*found, _extra("service", needed=True), _extra("postgres", needed=is_postgres_configured())]
    except metadata.PackageNotFoundError:
        return [
            *found,
            not_checked(
                "extra service",
                "unknown",
                cure="pip install 'ratchet-train[service,worker]'",
                detail="ratchet-train is not installed in this interpreter, only found on its path",
            ),
        ]


def is_postgres_configured() -> bool:
    """Return True if the service's database is PostgreSQL, by the variable ``RATCHET_DATABASE_URL``."""
    return os.environ.get(env_vars.DATABASE_URL, "").startswith("postgres")


def _extra(name: str, *, needed: bool) -> Finding:
    """Return the finding on the packages of the extra ``name``. ``needed`` False: the extra may be missing altogether."""
    wanted = required_packages(name)
    bad = [p for p in wanted if not p.is_satisfied]
    if not bad:
        return ok(f"extra {name}", "installed", ", ".join(f"{p.name} {p.installed}" for p in wanted))
    if not needed and all(p.installed is None for p in bad):
        return ok(f"extra {name}", "not installed", "not needed: the database is SQLite")
    words = "; ".join(f"{p.name} {p.installed or 'is missing'}, wanted {p.required}" for p in bad)
    return failed(f"extra {name}", "incomplete", detail=words, cure=f"pip install 'ratchet-train[{name}]'")


# --- cores and memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CgroupLimits:
    """The limits of this process's control groups, None if there are none or they are unknown. ``cores`` may be fractional;
    ``memory`` and ``used`` are in bytes."""

    cores: float | None = None
    memory: int | None = None
    used: int | None = None


def cgroup_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> CgroupLimits:
    """Return the tightest limits of this process's control groups and their parents. ``proc``, ``root``: where the kernel lists
    and mounts the groups."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return CgroupLimits()
    cores: list[float] = []
    memory: list[tuple[int, int | None]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers == "":
            for folder in _upwards(root, path):
                cores += _cpu_v2(folder)
                memory += _memory(folder / "memory.max", folder / "memory.current")
        if "cpu" in names:
            for folder in _upwards(_mounted(root, controllers, "cpu"), path):
                cores += _cpu_v1(folder)
        if "memory" in names:
            for folder in _upwards(_mounted(root, controllers, "memory"), path):
                memory += _memory(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes")
    limit, used = min(memory, key=lambda pair: pair[0], default=(None, None))
    return CgroupLimits(min(cores, default=None), limit, used)


def _mounted(root: Path, controllers: str, name: str) -> Path:
    """Return the directory where the cgroup v1 controller ``name`` is mounted, possibly together with the other
    ``controllers``."""
    together = root / controllers
    return together if together.is_dir() else root / name


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the existing directories of the group ``path`` below ``mount`` and of its parents, the group's own first."""
    parts = [p for p in path.split("/") if p and p != ".."]
    for count in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:count])
        if folder.is_dir():
            yield folder


def _words(path: Path) -> list[str]:
    """Return the words in the file; an empty list if it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def _cpu_v2(folder: Path) -> list[float]:
    """Return a list with the CPU quota, in cores, of the cgroup v2 directory ``folder``; empty if there is none."""
    words = _words(folder / "cpu.max")
    return [int(words[0]) / int(words[1])] if len(words) == 2 and words[0] != "max" else []


def _cpu_v1(folder: Path) -> list[float]:
    """Return a list with the CPU quota, in cores, of the cgroup v1 directory ``folder``; empty if there is none."""
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return [int(quota[0]) / int(period[0])] if quota and period and int(quota[0]) > 0 else []


def _memory(limit: Path, used: Path) -> list[tuple[int, int | None]]:
    """Return a list with one pair of limit and use, in bytes, from these files; empty if there is no limit."""
    words, now = _words(limit), _words(used)
    if not words or words[0] == "max" or int(words[0]) >= _UNLIMITED:
        return []
    return [(int(words[0]), int(now[0]) if now else None)]


def cores(limits: CgroupLimits) -> Finding:
    """Return the finding on CPU cores: a warning if the CPU quota is below the cores that this process may use."""
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable} of {pluralize(total, 'core')}"
    if limits.cores is not None and limits.cores < usable:
        slots = max(1, math.floor(limits.cores))
        return warning(
            "cpu",
            f"{value}, quota {limits.cores:g}",
            cure=f"ratchet serve --cpu-slots {slots}",
            detail="the container's quota is below the cores that it sees: ranks are throttled and wait for one another",
        )
    return ok("cpu", value, "affinity of this process" if usable < total else None)


def memory(limits: CgroupLimits) -> Finding:
    """Return the finding on free memory, within the limit of the container; a warning below ``MIN_MEMORY``."""
    known = {
        line.split(":")[0]: int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if len(line.split()) == 3
    }
    total, free = known["MemTotal"], known.get("MemAvailable", known["MemFree"])
    note = None
    if limits.memory is not None and limits.memory < total:
        total, note = limits.memory, "limit of the container"
        free = min(free, total - (limits.used or 0))
    value = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < MIN_MEMORY:
        return warning(
            "memory",
            value,
            detail="a rank takes about 0.5 GiB before its model",
            cure="stop what uses it, raise the container's limit, or run one rank at a time: ratchet serve --cpu-slots 1",
        )
    return ok("memory", value, note)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Return the finding on the shared memory at ``path``: a warning if less than ``MIN_SHARED`` bytes are free."""
    cure = "docker run --shm-size=2g (or --ipc=host), in Kubernetes an emptyDir of medium Memory at /dev/shm; or num_workers=0"
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return warning("shared memory", "none", detail=f"{path}: {error.strerror}", cure=cure)
    size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    value = f"{free / 2**20:.0f} of {size / 2**20:.0f} MiB free"
    if free < MIN_SHARED:
        return warning(
            "shared memory",
            value,
            cure=cure,
            detail="DataLoader workers pass batches through it; if it is too small, a bus error kills them",
        )
    return ok("shared memory", value, str(path))


def open_files() -> Finding:
    """Return the finding on the limit of open files; a warning below ``MIN_OPEN_FILES``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        top = "4096" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
        return warning(
            "open files",
            shown,
            cure=f"ulimit -n {top} (in the shell that starts `ratchet serve`)",
            detail="service, followers of logs and DataLoader workers may run out of file descriptors",
        )
    return ok("open files", shown)


def most_processes(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Return the finding on the tightest limit on processes and threads: a warning below ``MIN_PROCESSES``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    bounds = [(soft, "ulimit -u")] if soft != resource.RLIM_INFINITY and os.geteuid() != 0 else []
    try:
        groups = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        mount = root if controllers == "" else root / "pids" if "pids" in controllers.split(",") else None
        for folder in () if mount is None else _upwards(mount, path):
            words = _words(folder / "pids.max")
            bounds += [(int(words[0]), "pids.max")] if words and words[0].isdigit() else []
    if not bounds:
        return ok("processes", "unlimited")
    most, by = min(bounds)
    if most < MIN_PROCESSES:
        return warning(
            "processes",
            str(most),
            detail=f"by {by}, threads included: a rank has some twenty, and more with DataLoader workers",
            cure="docker run --pids-limit 4096; TasksMax=infinity in the systemd unit; or ulimit -u 4096",
        )
    return ok("processes", str(most), f"by {by}, threads included")


# --- clock ---------------------------------------------------------------------------------------------------------------


def clock() -> list[Finding]:
    """Return two findings: whether the clock is plausible, and whether it is synchronised."""
    now = datetime.now(UTC)
    shown = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    if now.year < BUILD_YEAR:
        return [
            failed(
                "clock",
                shown,
                detail=f"this Ratchet was built in {BUILD_YEAR}: the clock is wrong",
                cure="timedatectl set-ntp true, or set it with date -s (of a container: on its host)",
            ),
            _synchronised(),
        ]
    return [ok("clock", shown), _synchronised()]


class _Timex(ctypes.Structure):
    """``struct timex`` of <sys/timex.h>, up to the last field that is read; the rest is padding."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_byte * 256),
    )


def _synchronised() -> Finding:
    """Return the finding on the kernel's synchronisation status from adjtimex(2), which is called so that it only reads."""
    name = "clock synchronised"
    cure = "timedatectl set-ntp true (systemd-timesyncd, chrony or ntpd keeps it right; of a container: on its host)"
    try:
        libc, state = ctypes.CDLL(None, use_errno=True), _Timex()
        answer = libc.adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        answer, state = -1, _Timex()
    if answer < 0:
        return not_checked(
            name, "unknown", detail="this system does not report it (adjtimex)", cure="timedatectl status"
        )
    if answer == _TIME_ERROR or state.status & _STA_UNSYNC:
        return warning(
            name, "no", detail="this clock is not synchronised: times in events and a job's ttl may be wrong", cure=cure
        )
    return ok(name, "yes", f"estimated error {state.esterror / 1000:.1f} ms")
