"""Makes the commands of all processes that run users' code or their interpreter: agents, probes of hooks and interpreters, and
exports. Such a process runs as the jobs' user if there is one, within limits, and cannot gain rights by setuid programs. With
neither a user nor limits, as for agents without ``--run-as``, the command is started as it is.

It also defines which variables of the service's own environment no job gets, neither inherited nor as a secret by another name.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ratchet_contract import env_vars as names
from ratchet_contract.spec.job import JobSpec

_PROGRAM: Final = str(Path(__file__).with_name("sandbox_exec.py"))
_SESSION_PREFIXES: Final = ("XDG_", "SUDO_", "SSH_", "DBUS_")
"""Prefixes of variables that belong to the login session of the service's user."""
_ROOT_PREFIXES: Final = ("PATH", "LANG", "LC_", "LD_")
"""Prefixes of variables that ``sandbox_exec`` gets, from the service's own environment: while it is root it must have nothing
that a submitter chose."""
MARKER_VARIABLE: Final = "RATCHET_ASKED"
"""Environment variable of a process that ``subprocess_query`` starts, inherited by everything that it starts."""
_MARKER_VARIABLES: Final = (names.ATTEMPT_DIR, MARKER_VARIABLE)
_DEFAULT_MEMORY_BYTES: Final = 8 << 30
_DEFAULT_OPEN_FILES: Final = 4096


@dataclass(frozen=True)
class User:
    """A user of this machine: ids, all groups, home directory and name."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} (user {self.uid}, group {self.gid})"


@dataclass(frozen=True)
class Limits:
    """Limits of processes; None: the limit is inherited from the service. They are hard limits, never above the service's own.
    For each process: ``memory`` in bytes (RLIMIT_DATA), ``open_files``, ``cpu`` in seconds of processor time, ``core`` (size of a
    core dump) and ``file_size`` (of each file that it writes) in bytes. For all processes of its user together: ``processes``,
    including threads (RLIMIT_NPROC)."""

    memory: int | None = None
    open_files: int | None = None
    cpu: int | None = None
    core: int | None = None
    processes: int | None = None
    file_size: int | None = None

    def min_with(self, other: Limits) -> Limits:
        """Return for each limit the smaller value of ``self`` and ``other``; None only where both are None."""
        mine, others = asdict(self), asdict(other)
        given = {name: [value for value in (mine[name], others[name]) if value is not None] for name in mine}
        return Limits(**{name: min(values) for name, values in given.items() if values})


NO_LIMITS: Final = Limits()


def probe_limits(spec: JobSpec | None, seconds: float) -> Limits:
    """Return the limits of a probe: a short process that runs the code or interpreter of ``spec`` and takes at most ``seconds``.
    Memory and open files are limited as in the spec. Without such a limit there, or if ``spec`` is None, the limit is more than
    any probe needs. Processor time is limited to about ``seconds``, and no core is dumped."""
    share = None if spec is None else spec.memory_per_rank
    files = None if spec is None else spec.resources.open_files
    return Limits(share or _DEFAULT_MEMORY_BYTES, files or _DEFAULT_OPEN_FILES, int(seconds) + 1, core=0)


class Command(NamedTuple):
    """A command to execute, with its environment. ``fds``: descriptors that it must inherit under the same numbers."""

    argv: list[str]
    env: dict[str, str]
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sandbox:
    """How processes with users' code run. ``user``: the user that they run as; None: the service's own user. ``max_limits``:
    upper bounds of each process's limits."""

    user: User | None = None
    max_limits: Limits = NO_LIMITS

    @contextmanager
    def command(
        self, argv: Sequence[str], environ: Mapping[str, str], limits: Limits | None = None, cwd: str | None = None
    ) -> Iterator[Command]:
        """Yield the command that starts ``argv`` in this sandbox; the caller starts it within the block. ``argv[0]`` is a path.
        ``environ``: the environment of ``argv``; ``limits``: its own limits, which cannot exceed ``max_limits``; ``cwd``: its
        directory, None for that of its parent. The process keeps its pid and its descriptors. From its start it can be found by
        those of the marker variables (``RATCHET_ATTEMPT_DIR``, ``RATCHET_ASKED``) that ``environ`` has. Raises ``OSError`` for a
        program that not even the service can run.

        If the sandbox has no user and ``limits`` is None, the command is ``argv`` itself: ``cwd`` and ``max_limits`` have no
        effect, and nothing is checked."""
        within = (limits or NO_LIMITS).min_with(self.max_limits)
        if self.user is None and limits is None:
            yield Command(list(argv), dict(environ))
            return
        if shutil.which(argv[0]) is None:
            code = errno.EACCES if Path(argv[0]).exists() else errno.ENOENT
            raise OSError(code, os.strerror(code), argv[0])
        user = None if self.user is None else [self.user.uid, self.user.gid, list(self.user.groups)]
        options = {
            "user": user,
            "limits": asdict(within),
            "cwd": cwd,
            "environ": self.environment(environ),
        }
        env = {key: value for key, value in os.environ.items() if key.startswith(_ROOT_PREFIXES)}
        env |= {key: environ[key] for key in _MARKER_VARIABLES if key in environ}
        with os.fdopen(os.memfd_create("told"), "w+") as file:  # not an argument, which every user can see
            # A memfd is open to all users at first, and a link made by user code may lead the service to it by /proc/self/fd.
            os.fchmod(file.fileno(), 0)
            json.dump(options, file)
            file.flush()
            file.seek(0)
            fd = file.fileno()
            yield Command([sys.executable, "-I", "-S", _PROGRAM, str(fd), *argv], env, (fd,))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return ``environ`` with HOME, USER and LOGNAME of the sandbox's user, and without the variables that belong to the
        login session of the service's user. If the sandbox has no user, return an unchanged copy."""
        if self.user is None:
            return dict(environ)
        kept = {key: value for key, value in environ.items() if not key.startswith(_SESSION_PREFIXES)}
        return kept | {"HOME": self.user.home, "USER": self.user.name, "LOGNAME": self.user.name}


NO_SANDBOX: Final = Sandbox()
"""Runs as the service's own user."""


_DATABASE: Final = frozenset({"DATABASE_URL", "PGPASSWORD", "PGPASSFILE", "PGUSER", "PGSERVICE", "PGSERVICEFILE"})
_BARE: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ")
_BARE_PREFIXES: Final = ("LC_", "LD_", "PYTHON", "OMP_", "MKL_")


def withheld_names(environ: Mapping[str, str]) -> set[str]:
    """Return the names of variables in ``environ`` that no job gets: Ratchet's own, and those that give access to the database,
    including a copy of its URL under any name."""
    url = environ.get(names.DATABASE_URL)
    return {
        name
        for name, value in environ.items()
        if name.startswith("RATCHET_") or name in _DATABASE or name.endswith("_DATABASE_URL") or (url and value == url)
    }


def inherited_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that a process running a user's code or interpreter inherits: all but
    ``withheld_names``."""
    kept = withheld_names(environ)
    return {name: value for name, value in environ.items() if name not in kept}


def minimal_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return only the variables of ``environ`` that an interpreter needs to start: no credential of any kind."""
    return {k: v for k, v in inherited_environ(environ).items() if k in _BARE or k.startswith(_BARE_PREFIXES)}
