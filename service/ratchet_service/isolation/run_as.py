"""Parses ``--run-as USER[:GROUP]``, the user that users' code runs as, and prepares the run directory for that user. Parses
``--run-as-limits``, too: what the jobs of that user may take of the machine."""

from __future__ import annotations

import grp
import os
import pwd
import resource
import select
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import procfs
from ratchet_contract.spec.types import Size, size_in_bytes
from ratchet_service.errors import StartError
from ratchet_service.isolation.sandbox import Limits, Sandbox, User, minimal_environ

_CHECK_SECONDS: Final = 60.0
_UMASK: Final = 0o077
_MAX_ID: Final = 2**32 - 2  # 2**32 - 1 means "no change" to setresuid(2)
_CHECK_SCRIPT: Final = """
import os, resource, sys, threading
import ratchet_worker.agent
os.chdir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
    print("uncounted", flush=True)
except RuntimeError:
    print("here", flush=True)
sys.stdin.read()
"""


def parse_user(text: str | None) -> User | None:
    """Return the user that ``text``, ``USER[:GROUP]``, stands for, by names or numbers. None if ``text`` is None, or names the
    user (and the group, if it names one) that the service runs as. Raises ``StartError`` for an unknown name, for an unknown
    user number without a group, and for a user or group that jobs cannot run as."""
    if text is None:
        return None
    user, _, group = text.partition(":")
    entry = _lookup_user(user)
    if entry is None and not _is_number(user):
        raise StartError(f"--run-as {text}: this machine has no user {user!r}")
    uid = int(user) if entry is None else entry.pw_uid
    if not group and entry is None:
        raise StartError(
            f"--run-as {text}: user {uid} has no entry in the user database, so name a group, too: {uid}:GROUP"
        )
    gid = _lookup_group(text, group) if group else (entry.pw_gid if entry is not None else uid)
    if uid == os.geteuid() and (not group or gid == os.getegid()):
        return None
    if os.geteuid() != 0:
        raise StartError(
            f"--run-as {text}: the service runs as user {os.geteuid()}, and only root can start processes as another: start "
            "it as root, or omit --run-as"
        )
    if uid == 0 or gid == 0:
        raise StartError(
            f"--run-as {text}: root's own group would give users' code access to root's files: name another group"
        )
    if entry is None:
        return User(uid, gid, (gid,), "/", str(uid))
    groups = tuple(g for g in os.getgrouplist(entry.pw_name, gid) if g != 0)
    return User(uid, gid, groups, entry.pw_dir, entry.pw_name)


def _lookup_user(text: str) -> pwd.struct_passwd | None:
    """Return the user's entry in the user database, by name or number; None: there is none."""
    try:
        return pwd.getpwuid(int(text)) if _is_number(text) else pwd.getpwnam(text)
    except (KeyError, OverflowError):
        return None


def _lookup_group(text: str, group: str) -> int:
    """Return the group's number. Raises ``StartError`` for an unknown name. ``text``: the option's value, for the message."""
    if _is_number(group):
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise StartError(f"--run-as {text}: this machine has no group {group!r}") from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MAX_ID


def restrict_process() -> None:
    """Set the umask, so that other users cannot read new files, and drop supplementary groups. Raises ``PermissionError`` if this
    process is not allowed to drop them, for example without root."""
    os.umask(_UMASK)
    os.setgroups([])


def _is_process_restricted() -> bool:
    """True if other users cannot read new files of this process, and it has no supplementary groups: ``restrict_process`` sets
    both."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("Umask:"))
    return int(mask, 8) & _UMASK == _UMASK and not os.getgroups()


def prepare_run_directory(paths: HomePaths, user: User | None, database: Path | None) -> None:
    """Prepare the run directory for jobs that run as ``user``. The user can then reach the directories of jobs and code in it.
    The service's other files that exist there, and ``database``, are closed to other users. ``user`` is recorded in a file, and
    it is checked that ``user`` can run the agent. If ``user`` is None, only an existing record is emptied. ``database``: the
    database's file; None: the database is not a file.

    Raises ``StartError``, also if this process lacks what ``restrict_process`` sets. Raises ``OSError``.
    """
    if user is None:
        if paths.run_as_file.exists():  # directories of jobs still belong to the previous user
            paths.run_as_file.write_text("", encoding="utf-8")
        return
    if not _is_process_restricted():
        raise StartError(
            f"--run-as {user.name}: this process has supplementary groups, or its umask lets others read new files: start it "
            "with "
            "`ratchet serve` or `python -m ratchet_service`, or call ratchet_service.isolation.run_as.restrict_process() first"
        )
    _restrict_permissions(paths, database)
    paths.run_as_file.write_text(f"{user.name} {user.uid} {user.gid}\n", encoding="utf-8")
    paths.run_as_file.chmod(0o644)
    _check_user(paths, user)


def recorded_user(paths: HomePaths) -> str | None:
    """Return the user that jobs run as, as text, from the run directory's record. None if there is no record that names one."""
    try:
        name, uid, gid = paths.run_as_file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return f"{name} (user {uid}, group {gid})"


def _restrict_permissions(paths: HomePaths, database: Path | None) -> None:
    """Create the run directory and its directories of jobs and code where missing, and let other users only pass through them.
    Close the service's other files in the run directory, and those of the database, to other users. Other directories in the run
    directory are closed only if it was new or was itself closed to others before."""
    opened = (paths.home, paths.jobs, paths.code, paths.environments)
    closed = not paths.home.exists() or not paths.home.stat().st_mode & stat.S_IXOTH
    for folder in opened:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    private = [path for path in paths.home.iterdir() if path not in opened]
    if database is not None:
        private += [path for end in ("", "-wal", "-shm") if (path := database.with_name(database.name + end)).exists()]
    for path in private:
        with suppress(FileNotFoundError):  # another process of this run directory may have deleted it
            found = path.lstat()
            if found.st_uid == os.geteuid() and (
                stat.S_ISREG(found.st_mode) or (closed and stat.S_ISDIR(found.st_mode))
            ):
                path.chmod(found.st_mode & 0o700)
    for folder in opened:
        folder.chmod(0o711)


def first_closed_directory(user: User, path: Path) -> Path | None:
    """Return the first directory on the way to ``path`` whose mode does not let ``user`` pass; None if there is none."""
    ways, seen = [path], set[Path]()
    while ways:
        way = ways.pop(0)
        for part in [*reversed(way.parents), way]:
            if part in seen:
                continue
            seen.add(part)
            try:
                found = part.stat()
            except OSError:
                continue
            if part.is_symlink():
                ways.append(part.parent / part.readlink())
            own, group = found.st_uid == user.uid, found.st_gid in user.groups
            bit = stat.S_IXUSR if own else stat.S_IXGRP if group else stat.S_IXOTH
            if stat.S_ISDIR(found.st_mode) and not found.st_mode & bit:
                return part.resolve()
    return None


def _check_user(paths: HomePaths, user: User) -> None:
    """Raise ``StartError`` unless the user can run the agent and reach the jobs' directories. Also raise it if the kernel does
    not count the user's processes, or if this process cannot read their environment. Starts a process."""
    with (
        # without the user's limits: an earlier job that has used them up must not keep the service from starting
        Sandbox(user).command(
            [sys.executable, "-P", "-c", _CHECK_SCRIPT, str(paths.jobs)], minimal_environ(os.environ)
        ) as command,
        subprocess.Popen(
            command.argv,
            env=command.env,
            pass_fds=command.fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
        ) as child,
    ):
        assert child.stdout is not None
        answered, _, _ = select.select([child.stdout], [], [], _CHECK_SECONDS)
        reported = os.read(child.stdout.fileno(), 100).strip() if answered else b""
        try:
            seen = bool(procfs.read_environ(child.pid))
        except OSError:
            seen = False
        try:
            if not answered:
                raise subprocess.TimeoutExpired(command.argv, _CHECK_SECONDS)
            _, errors = child.communicate(timeout=_CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            raise StartError(
                f"--run-as {user.name}: {sys.executable} did not answer within {_CHECK_SECONDS:g} s"
            ) from None
    if reported == b"uncounted":
        raise StartError(
            f"--run-as {user.name}: this kernel does not count a user's processes (RLIMIT_NPROC), so a job that forks "
            "without limit could use up the machine's processes: use a host with another kernel, or Kubernetes"
        )
    if reported != b"here":
        last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        package = find_spec("ratchet_worker")
        needed = [Path(sys.executable), *map(Path, (package and package.submodule_search_locations) or ()), paths.jobs]
        closed = next((folder for path in needed if (folder := first_closed_directory(user, path)) is not None), None)
        cure = (
            "All directories above both must be searchable by others (mode o+x)"
            if closed is None
            else f"{closed} is not searchable by others: chmod o+x {shlex.quote(str(closed))}, or install Ratchet elsewhere"
        )
        raise StartError(
            f"--run-as {user.name}: that user cannot run {sys.executable} with ratchet_worker, or cannot reach {paths.jobs}: "
            f"{last}. {cure}"
        )
    if not seen:
        raise StartError(
            f"--run-as {user.name}: processes of that user cannot be inspected (/proc/PID/environ), so the service could not "
            "confirm that an attempt is dead: in a container, add the capability SYS_PTRACE"
        )


_OPTION: Final = "--run-as-limits"
_MIN_PROCESSES: Final = 16
"""For an agent with one rank; torch's threads alone are more, so this only catches a typing error."""
_MIN_FILE_BYTES: Final = 1 << 20
_SIZE: Final = TypeAdapter[str](Size)
_MACHINE_LIMIT_FILES: Final = (Path("/proc/sys/kernel/pid_max"), Path("/proc/sys/kernel/threads-max"))
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def parse_limits(text: str) -> Limits:
    """Return the limits in the value of ``--run-as-limits``. Raises ``ValueError`` with a message for users."""
    limits = Limits()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name == "processes" and value.isascii() and value.isdigit() and int(value) >= _MIN_PROCESSES:
            limits = replace(limits, processes=int(value))
        elif name == "file_size" and (size := _parse_size(value)) is not None and size >= _MIN_FILE_BYTES:
            limits = replace(limits, file_size=size)
        else:
            raise ValueError(
                f"{part!r} is not a "
                f"limit: processes=NUMBER (at least {_MIN_PROCESSES}, threads counted) or file_size=SIZE (like "
                "100Gi, at least 1Mi)"
            )
    return limits


def with_defaults(limits: Limits, user: User | None) -> Limits:
    """Return ``limits``. If ``user`` is set and ``limits.processes`` is None, the result has a default for it. Raises
    ``StartError`` for limits without a user, for limits above the service's own, and if the default cannot be found."""
    if user is None:
        if limits != Limits():
            raise StartError(
                f"{_OPTION} needs --run-as: the kernel counts processes by user, and would count the service's own processes "
                "with those of jobs"
            )
        return limits
    for name, kind in (("processes", resource.RLIMIT_NPROC), ("file_size", resource.RLIMIT_FSIZE)):
        wanted, (_, most) = getattr(limits, name), resource.getrlimit(kind)
        if wanted is not None and most != resource.RLIM_INFINITY and wanted > most:
            raise StartError(f"{_OPTION} {name}={wanted}: the service's own limit is {most}")
    if limits.processes is None:
        return replace(limits, processes=max(_MIN_PROCESSES, max_processes() // 2))
    return limits


def max_processes(cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> int:
    """Return the smallest known limit on the processes, threads counted, of this machine, its container or this process's user.
    Raises ``StartError`` if none is known."""
    found = list(_machine_limits())
    found += _cgroup_limits(cgroup, cgroups)
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    found += [] if hard == resource.RLIM_INFINITY else [hard]
    if not found:
        raise StartError(f"the process limit of this machine is unknown: set {_OPTION} processes=NUMBER")
    return min(found)


def _machine_limits() -> Iterator[int]:
    """Yield the kernel's limits that can be read; a container may hide them."""
    for path in _MACHINE_LIMIT_FILES:
        with suppress(OSError, ValueError):
            yield int(path.read_text())


def _cgroup_limits(cgroup: Path, cgroups: Path) -> Iterator[int]:
    """Yield the limits in ``pids.max`` of this process's control group and of those above it, for control groups of versions 1
    and 2."""
    with suppress(OSError):
        for line in cgroup.read_text().splitlines():
            number, controllers, place = line.split(":", 2)
            if number == "0" or "pids" in controllers.split(","):
                top = cgroups if number == "0" else cgroups / "pids"
                folder = top / place.lstrip("/")
                for group in (folder, *folder.parents):
                    if not group.is_relative_to(top):
                        break
                    with suppress(OSError, ValueError):  # the root group has no such file; "max" means no limit
                        yield int((group / "pids.max").read_text())


def _parse_size(text: str) -> int | None:
    """Return the size in bytes that ``text``, such as ``100Gi``, stands for; None if it is not a size."""
    try:
        return size_in_bytes(_SIZE.validate_python(text))
    except ValidationError:
        return None
