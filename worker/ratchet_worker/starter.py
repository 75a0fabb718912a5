"""How a rank's process comes to life. The agent knows only the protocols; ``ProcessStarter`` is the plain way, ``forking`` the
quick one. Another (one that starts a container) gives the same two. Whatever it does, a rank is the leader of its own session
and process group.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet_worker import procs, stacks


@dataclass(frozen=True)
class RankPlan:
    """One rank's process: what is run, where, with which variables, into which log; ``pass_fds`` keep their numbers."""

    rank: int
    command: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path
    pass_fds: Sequence[int] = ()


class RankProcess(Protocol):
    """A started rank. Its pid is its process group's id and stays taken until ``reap``."""

    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int: ...

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended."""

    def exit_code(self) -> int | None:
        """None while it runs; ``-signal`` when a signal ended it. Does not collect the process."""

    def kill_group(self) -> None:
        """SIGKILL to the whole process group."""

    def ask_for_stacks(self) -> None:
        """The rank writes all its threads' stacks to its log (``stacks``); one that is halted by a signal goes on for it."""

    def reap(self) -> None:
        """Collect the ended process and let go of its descriptor."""


class Starter(Protocol):
    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        """Start the ranks, and give each as soon as it is there to be watched. Called from the agent's main thread only: ranks
        die with the thread that forked them.

        Raises ``OSError`` when the program cannot be run; what was given before is then the caller's to end.
        """


class ProcessStarter:
    """A fresh interpreter per rank."""

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        return map(start_process, plans)


def start_process(plan: RankPlan) -> Child:
    """One fresh interpreter. Raises ``OSError`` when it cannot be run."""
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
    process.returncode = 0  # waiting for it is the Child's affair
    return Child(plan.rank, process.pid)


class Child:
    """A child of this process. Raises ``ProcessLookupError`` when there is none with that pid."""

    def __init__(self, rank: int, pid: int) -> None:
        self._rank, self._pid = rank, pid
        self._pidfd = os.pidfd_open(pid)
        self._collected: int | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def pid(self) -> int:
        return self._pid

    def fileno(self) -> int:
        return self._pidfd

    def exit_code(self) -> int | None:
        if self._collected is not None:
            return self._collected
        # WNOWAIT leaves the zombie: while it is there, nobody else gets its pid, and its group can be killed safely.
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def kill_group(self) -> None:
        if self._collected is None:
            procs.kill_group(self.pid)

    def ask_for_stacks(self) -> None:
        if self.exit_code() is None:
            stacks.ask(self.pid)

    def reap(self) -> None:
        if self._collected is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self._collected = self.exit_code()
            os.waitpid(self.pid, 0)
            os.close(self._pidfd)
