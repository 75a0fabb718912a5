"""How every process is started that runs users' code or their interpreter: as the worker's user where there is one, within
limits, unable to gain rights by setuid programs. Agents, looks at hooks, questions to interpreters and exports all come by here.
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

from ratchet_contract import environment as names
from ratchet_contract.spec import JobSpec

_PROGRAM: Final = str(Path(__file__).with_name("become.py"))
_OTHERS: Final = ("XDG_", "SUDO_", "SSH_", "DBUS_")
"""Variables of the service's user's own session."""
_OF_ROOT: Final = ("PATH", "LANG", "LC_", "LD_")
"""What ``become`` has of the service's own environment: while it is root it must have nothing that a submitter chose."""
MARK: Final = "RATCHET_ASKED"
"""The variable that a process started to be asked (``children``), and all that it starts, has in its environment."""
_MARKS: Final = (names.ATTEMPT_DIR, MARK)
_MEMORY: Final = 8 << 30
_OPEN_FILES: Final = 4096


@dataclass(frozen=True)
class User:
    """Numbers, all groups, and the home directory."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} (user {self.uid}, group {self.gid})"


@dataclass(frozen=True)
class Limits:
    """Of each process: ``memory`` in bytes (RLIMIT_DATA), ``open_files``, ``cpu`` in seconds of processor time, ``core`` and
    ``file_size``, of what it writes to (RLIMIT_FSIZE), in bytes; of its user: ``processes``, threads counted (RLIMIT_NPROC).
    None: as the service has it. Hard limits; never above what the service itself may have."""

    memory: int | None = None
    open_files: int | None = None
    cpu: int | None = None
    core: int | None = None
    processes: int | None = None
    file_size: int | None = None

    def beside(self, other: Limits) -> Limits:
        """Of each the smaller one."""
        mine, others = asdict(self), asdict(other)
        given = {name: [value for value in (mine[name], others[name]) if value is not None] for name in mine}
        return Limits(**{name: min(values) for name, values in given.items() if values})


NO_LIMITS: Final = Limits()


def limits_of(spec: JobSpec | None, seconds: float) -> Limits:
    """For a look at code or interpreter of ``spec`` of at most ``seconds``: its own limits, else what a look never needs."""
    share = None if spec is None else spec.memory_of_a_rank
    files = None if spec is None else spec.resources.open_files
    return Limits(share or _MEMORY, files or _OPEN_FILES, int(seconds) + 1, core=0)


class Command(NamedTuple):
    """What is to be executed: with these variables, and ``fds`` inherited under their own numbers."""

    argv: list[str]
    env: dict[str, str]
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Confined:
    """``user`` None: users' code runs as the service's own user. ``most``: what that user may take, whatever a process's own
    limits are."""

    user: User | None = None
    most: Limits = NO_LIMITS

    @contextmanager
    def command(
        self, argv: Sequence[str], environ: Mapping[str, str], limits: Limits | None = None, cwd: str | None = None
    ) -> Iterator[Command]:
        """``argv`` with ``environ`` as a command to start within the block. The process keeps its number and its descriptors,
        and, without ``cwd``, its directory. From its first moment it is known by its marks (``RATCHET_ATTEMPT_DIR``,
        ``RATCHET_ASKED``). Raises ``OSError`` for a program that even the service cannot run."""
        within = (limits or NO_LIMITS).beside(self.most)
        if self.user is None and limits is None:
            yield Command(list(argv), dict(environ))
            return
        if shutil.which(argv[0]) is None:
            code = errno.EACCES if Path(argv[0]).exists() else errno.ENOENT
            raise OSError(code, os.strerror(code), argv[0])
        user = None if self.user is None else [self.user.uid, self.user.gid, list(self.user.groups)]
        told = {
            "user": user,
            "limits": asdict(within),
            "cwd": cwd,
            "environ": self.environment(environ),
        }
        env = {key: value for key, value in os.environ.items() if key.startswith(_OF_ROOT)}
        env |= {key: environ[key] for key in _MARKS if key in environ}
        with os.fdopen(os.memfd_create("told"), "w+") as file:  # no argument: those are for everybody to see
            # Such a file is open to all at first, and a link of user code's may lead the service to /proc/self/fd in its name.
            os.fchmod(file.fileno(), 0)
            json.dump(told, file)
            file.flush()
            file.seek(0)
            fd = file.fileno()
            yield Command([sys.executable, "-I", "-S", _PROGRAM, str(fd), *argv], env, (fd,))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` as the user would have it."""
        if self.user is None:
            return dict(environ)
        kept = {key: value for key, value in environ.items() if not key.startswith(_OTHERS)}
        return kept | {"HOME": self.user.home, "USER": self.user.name, "LOGNAME": self.user.name}


OWN: Final = Confined()
"""As the service's own user."""
