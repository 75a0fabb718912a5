"""Starting a rank's process, which is the leader of its own session and process group. ``fork_starter`` has a faster
implementation."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet_worker.ipc import stack_dump


@dataclass(frozen=True)
class RankPlan:
    """How to run one rank's process. ``env``: its whole environment; ``log``: file for its output; ``pass_fds``: descriptors
    inherited under the same numbers."""

    rank: int
    command: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path
    pass_fds: Sequence[int] = ()


class RankProcess(Protocol):
    """A started rank. Its pid is also its process group's id, and is not reused before ``reap``."""

    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int: ...

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has ended, and perhaps earlier. The descriptor may
        change: call this before each wait."""

    def exit_code(self) -> int | None:
        """The exit code: None while the process runs, ``-signal`` if a signal ended it. Does not reap the process."""

    def kill_group(self) -> None:
        """Send SIGKILL to the whole process group."""

    def request_stacks(self) -> None:
        """Request, by a signal, that the rank writes the stacks of its threads to its log. The signal continues a halted rank,
        and ends one without a handler."""

    def reap(self) -> None:
        """Reap the ended process and close its descriptor."""


class Starter(Protocol):
    """Starts the processes of the ranks (``ProcessStarter`` or ``ForkingStarter``)."""

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        """Start the ranks, and yield each one as soon as it can be watched; call it in the main thread only. After an ``OSError``
        the caller must end the ranks that were yielded."""


class ProcessStarter:
    """Starts a fresh interpreter for each rank."""

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        """Return an iterator that starts each rank's process when it is advanced. Raises ``OSError`` then."""
        return map(start_process, plans)


def start_process(plan: RankPlan) -> Child:
    """Start a fresh interpreter in a session of its own, with its output appended to the plan's log. Raises ``OSError``."""
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    with plan.log.open("ab") as log:
        process = subprocess.Popen(
            list(plan.command),
            cwd=plan.cwd,
            env=dict(plan.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,  # one file description: lines of both keep their order
            start_new_session=True,
            pass_fds=tuple(plan.pass_fds),
        )
    process.returncode = 0  # Child reaps it, not subprocess
    return Child(plan.rank, process.pid)


class Child:
    """A child of this process, as a ``RankProcess``. Raises ``ProcessLookupError`` if no process has that pid."""

    def __init__(self, rank: int, pid: int) -> None:
        self._rank, self._pid = rank, pid
        self._pidfd = os.pidfd_open(pid)
        self._reaped_exit_code: int | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def pid(self) -> int:
        return self._pid

    def fileno(self) -> int:
        return self._pidfd

    def exit_code(self) -> int | None:
        """Return the exit code, also after ``reap``: None while the process runs, ``-signal`` if a signal ended it."""
        if self._reaped_exit_code is not None:
            return self._reaped_exit_code
        # WNOWAIT leaves the zombie: while it exists, its pid is not reused, and its group can be killed safely.
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def kill_group(self) -> None:
        """Send SIGKILL to the whole process group; does nothing after ``reap``, since the pid may be reused then."""
        if self._reaped_exit_code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def request_stacks(self) -> None:
        """Request, by a signal, that the process writes the stacks of its threads to its log. The signal continues a halted
        process, and ends one without a handler."""
        if self.exit_code() is None:
            stack_dump.request_dump(self.pid)

    def reap(self) -> None:
        """Wait for the end of the process, reap it and close its descriptor. The exit code is kept."""
        if self._reaped_exit_code is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self._reaped_exit_code = self.exit_code()
            os.waitpid(self.pid, 0)
            os.close(self._pidfd)
