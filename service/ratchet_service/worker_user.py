"""The user that users' code runs as: agents, their ranks, and what is asked beside the API (``--run-as USER[:GROUP]``)."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ratchet_contract.paths import HomePaths
from ratchet_service.confined import Confined, User
from ratchet_service.credentials import bare
from ratchet_service.listening import StartError

_SECONDS: Final = 60.0
_MASK: Final = 0o077
_TRY: Final = """
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


def find(text: str | None) -> User | None:
    """The user that ``USER[:GROUP]`` names, each by name or number; None where that is the service's own, or nothing is named.
    Raises ``StartError`` for one that is not there, and where the service, not being root, cannot become it."""
    if text is None:
        return None
    user, _, group = text.partition(":")
    entry = _user(user)
    if entry is None and not _is_number(user):
        raise StartError(f"--run-as {text}: this machine has no user {user!r}")
    uid = int(user) if entry is None else entry.pw_uid
    if not group and entry is None:
        raise StartError(
            f"--run-as {text}: user {uid} has no entry in the user database, so name a group, too: {uid}:GROUP"
        )
    gid = _group(text, group) if group else (entry.pw_gid if entry is not None else uid)
    if uid == os.geteuid() and (not group or gid == os.getegid()):
        return None
    if os.geteuid() != 0:
        raise StartError(
            f"--run-as {text}: the service runs as user {os.geteuid()}, and only root can start processes as another: start it "
            "as root, or leave --run-as out"
        )
    if uid == 0 or gid == 0:
        raise StartError(f"--run-as {text}: root's own group would open root's files to users' code: name another one")
    if entry is None:
        return User(uid, gid, (gid,), "/", str(uid))
    groups = tuple(g for g in os.getgrouplist(entry.pw_name, gid) if g != 0)
    return User(uid, gid, groups, entry.pw_dir, entry.pw_name)


def _user(text: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(int(text)) if _is_number(text) else pwd.getpwnam(text)
    except (KeyError, OverflowError):
        return None


def _group(text: str, group: str) -> int:
    if _is_number(group):
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise StartError(f"--run-as {text}: this machine has no group {group!r}") from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def own_process() -> None:
    """Of all of this process, so for a program's way in alone. What it writes is nobody else's to read, and it has no groups, by
    which it would read in the name of another user (``file_owner``) what only root may."""
    os.umask(_MASK)
    os.setgroups([])


def _is_own_process() -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("Umask:"))
    return int(mask, 8) & _MASK == _MASK and not os.getgroups()


def settle(paths: HomePaths, user: User | None, database: Path | None) -> None:
    """Before anything is started: the run directory lets ``user`` through to its jobs' directories and to no other file, and
    the user can work there. ``database``: its file, where it is one. Raises ``StartError``, also in a process whose files others
    may read or that has groups: nothing of the process is changed here."""
    if user is None:
        if paths.run_as_file.exists():  # directories of jobs still belong to the user before
            paths.run_as_file.write_text("", encoding="utf-8")
        return
    if not _is_own_process():
        raise StartError(
            f"--run-as {user.name}: this process has groups of its own, or makes files that others may read: start it by "
            "`ratchet serve` or `python -m ratchet_service`, or call ratchet_service.worker_user.own_process() first"
        )
    _shut(paths, database)
    paths.run_as_file.write_text(f"{user.name} {user.uid} {user.gid}\n", encoding="utf-8")
    paths.run_as_file.chmod(0o644)
    _try(paths, user)


def recorded(paths: HomePaths) -> str | None:
    """The user of the service that was started last in this run directory, for people; None: users' code runs as the service."""
    try:
        name, uid, gid = paths.run_as_file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return f"{name} (user {uid}, group {gid})"


def _shut(paths: HomePaths, database: Path | None) -> None:
    """Directories of others' making (copies of the database, perhaps) are closed where only the run directory's mode has kept
    everybody from them until now."""
    opened = (paths.home, paths.jobs, paths.code)
    closed = not paths.home.exists() or not paths.home.stat().st_mode & stat.S_IXOTH
    for folder in opened:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    private = [path for path in paths.home.iterdir() if path not in opened]
    if database is not None:
        private += [path for end in ("", "-wal", "-shm") if (path := database.with_name(database.name + end)).exists()]
    for path in private:
        with suppress(FileNotFoundError):  # another process of this run directory is at work
            found = path.lstat()
            if found.st_uid == os.geteuid() and (
                stat.S_ISREG(found.st_mode) or (closed and stat.S_ISDIR(found.st_mode))
            ):
                path.chmod(found.st_mode & 0o700)
    for folder in opened:
        folder.chmod(0o711)


def closed_to(user: User, path: Path) -> Path | None:
    """The first directory on the way to ``path``, through every link, whose mode does not let ``user`` pass."""
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


def _try(paths: HomePaths, user: User) -> None:
    """Can the user run the agent and reach the jobs? Does the kernel count its processes? Can they be seen, by which an attempt
    is proved dead? Without the user's limits: a job of before that has used them up must not keep the service from starting."""
    with (
        Confined(user).command([sys.executable, "-P", "-c", _TRY, str(paths.jobs)], bare(os.environ)) as command,
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
        told = child.stdout.readline().strip()
        try:
            seen = bool(Path(f"/proc/{child.pid}/environ").read_bytes())
        except OSError:
            seen = False
        try:
            _, said = child.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            raise StartError(f"--run-as {user.name}: {sys.executable} did not answer within {_SECONDS:g} s") from None
    if told == b"uncounted":
        raise StartError(
            f"--run-as {user.name}: this kernel does not count a user's processes (RLIMIT_NPROC), so a job that forks without an "
            "end would take all of the machine's: use another one, or Kubernetes"
        )
    if told != b"here":
        last = (said.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        package = find_spec("ratchet_worker")
        needed = [Path(sys.executable), *map(Path, (package and package.submodule_search_locations) or ()), paths.jobs]
        closed = next((folder for path in needed if (folder := closed_to(user, path)) is not None), None)
        cure = (
            "All directories above both must let others through (mode o+x)"
            if closed is None
            else f"{closed} lets others not through: chmod o+x {shlex.quote(str(closed))}, or install Ratchet elsewhere"
        )
        raise StartError(
            f"--run-as {user.name}: that user cannot run {sys.executable} with ratchet_worker, or cannot reach {paths.jobs}: "
            f"{last}. {cure}"
        )
    if not seen:
        raise StartError(
            f"--run-as {user.name}: processes of that user cannot be looked at (/proc/PID/environ), so no attempt could be "
            "proved dead: in a container, add the capability SYS_PTRACE"
        )
