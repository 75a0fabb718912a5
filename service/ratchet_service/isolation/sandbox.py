"""Makes the commands of processes that run users' code or their interpreter. Such a process may run as the jobs' user and within
limits. The module also defines which variables of the environment jobs do not inherit."""

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
    """A user of this machine: ids, all groups (the first one included), home directory and name."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} (user {self.uid}, group {self.gid})"


@dataclass(frozen=True)
class Limits:
    """Hard limits of processes; None: inherited. ``memory``, ``core`` and ``file_size`` are in bytes, ``cpu`` in
    seconds of processor time. ``processes`` counts all processes and threads of the user together."""

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
    """Return the limits of a probe, a short process that runs the code or interpreter of ``spec``. ``seconds``: processor time;
    the caller must end a process that waits longer."""
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
    """How processes with users' code run. ``user`` None: that of this process. ``max_limits``: upper bounds of each process's
    limits."""

    user: User | None = None
    max_limits: Limits = NO_LIMITS

    @contextmanager
    def command(
        self, argv: Sequence[str], environ: Mapping[str, str], limits: Limits | None = None, cwd: str | None = None
    ) -> Iterator[Command]:
        """Yield the command that starts ``argv`` in this sandbox; the caller starts it within the block. ``argv[0]`` is a path.
        May raise ``OSError`` if the file at this path cannot be executed.

        Without a user and ``limits`` the command is ``argv`` itself: ``cwd`` and ``max_limits`` have no effect.
        """
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
        """Return ``environ`` for the sandbox's user: with this user's HOME, USER and LOGNAME, and without variables of a login
        session. Without a user: a copy."""
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
    """Return the names of variables in ``environ`` that jobs do not inherit: Ratchet's own, and known ones that give access to
    the database."""
    url = environ.get(names.DATABASE_URL)
    return {
        name
        for name, value in environ.items()
        if name.startswith("RATCHET_") or name in _DATABASE or name.endswith("_DATABASE_URL") or (url and value == url)
    }


def inherited_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that a process with a user's code or interpreter may inherit."""
    kept = withheld_names(environ)
    return {name: value for name, value in environ.items() if name not in kept}


def minimal_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return only the variables of ``environ`` that an interpreter may need to start: no usual name of a credential is among
    them."""
    return {k: v for k, v in inherited_environ(environ).items() if k in _BARE or k.startswith(_BARE_PREFIXES)}
