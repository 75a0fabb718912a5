"""Starts ranks by forking one process that has imported torch (``fork_server``): that import is nearly all of a rank's start-up
time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ratchet_contract import env_vars as names
from ratchet_worker.agent.rank_starter import Child, RankPlan, RankProcess, start_process
from ratchet_worker.ipc.log_lines import log_message


class ForkingStarter:
    """Starts ranks that use no CUDA by forking. ``modules`` are imported before the forks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        """Start the fork server with all plans, and return the ranks. Raises ``OSError`` if the server cannot be started."""
        server = _Server(plans, self._modules)
        return (_Forked(plan.rank, server) for plan in plans)


class _Server:
    """The agent's side of the fork server, whose process it starts: the ranks that have been forked so far."""

    def __init__(self, plans: Sequence[RankPlan], modules: Sequence[str]) -> None:
        self._report, report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with os.fdopen(os.memfd_create("plans", os.MFD_CLOEXEC), "wb") as file:  # contains secrets: never on a disk
                file.write(json.dumps([[_as_dict(plan) for plan in plans], list(modules)]).encode())
                file.flush()
                os.set_blocking(report, True)
                self._process = start_process(_server_plan(plans, file.fileno(), report))
        except BaseException:
            os.close(self._report)
            raise
        finally:
            os.close(report)
        self._buffer = b""
        self._children: dict[int, Child] = {}
        self._pending_ranks = {plan.rank for plan in plans}

    def process_for(self, rank: int) -> Child:
        """The rank's process, or the server's process until the rank has been forked. Reads the server's reports first."""
        self._read_reports()
        return self._children.get(rank, self._process)

    def has_forked(self, rank: int) -> bool:
        """True if the server has reported the rank's own process."""
        return self.process_for(rank) is not self._process

    def wakeup_fd(self, rank: int) -> int:
        """Return a descriptor that becomes readable on news of ``rank``. It changes when the rank is forked or the server
        ends."""
        process = self.process_for(rank)
        return self._report if process is self._process and process.exit_code() is None else process.fileno()

    def kill(self) -> None:
        """Kill the server, so that it forks no more ranks, wait for its death, and read its last reports."""
        self._process.kill_group()
        if self._process.exit_code() is None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._read_reports()

    def _read_reports(self) -> None:
        """Read the server's new reports, the pids of ranks, without waiting."""
        if not self._pending_ranks:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._report, 4096):
                self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            rank, pid = map(int, line.split())
            # Every reported rank is a child of this process: if it has ended already, it is a zombie and its pid is valid.
            self._children[rank] = Child(rank, pid)
            self._pending_ranks.discard(rank)
            log_message(f"rank {rank} is process {pid}")
        if not self._pending_ranks:
            os.close(self._report)
            # the server ends now and is reaped like an orphan; nothing waits for its end, since that may be delayed
            os.close(self._process.fileno())


class _Forked:
    """A rank that a fork server starts. Until the rank is forked, the server's process stands for it."""

    def __init__(self, rank: int, server: _Server) -> None:
        self._rank, self._server = rank, server

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def pid(self) -> int:
        return self._server.process_for(self._rank).pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable on news of this rank. It may change: call this before each wait."""
        return self._server.wakeup_fd(self._rank)

    def exit_code(self) -> int | None:
        """Return the rank's exit code, None while it runs; the server's if the rank was never forked."""
        code = self._server.process_for(self._rank).exit_code()
        # The code may be the server's, if it has reported this rank and ended since ``process_for``: query again.
        return None if code is None else self._server.process_for(self._rank).exit_code()

    def kill_group(self) -> None:
        """Kill the rank's process group or, before the rank is forked, the server, and so all ranks not forked yet."""
        if not self._server.has_forked(self._rank):
            self._server.kill()
        self._server.process_for(self._rank).kill_group()

    def request_stacks(self) -> None:
        """Request the stacks of the rank's process or, before the rank is forked, of the server."""
        self._server.process_for(self._rank).request_stacks()

    def reap(self) -> None:
        """Wait for the end of the rank's process, or the server's if the rank was never forked, and reap it."""
        self._server.process_for(self._rank).reap()


def _server_plan(plans: Sequence[RankPlan], plans_fd: int, report_fd: int) -> RankPlan:
    """Return the plan of the fork server: the first rank's, with all descriptors and the variables that all ranks share."""
    first = plans[0]
    shared = {k: v for k, v in first.env.items() if all(plan.env.get(k) == v for plan in plans)}
    env = shared | {names.FORK_PLANS_FD: str(plans_fd), names.FORK_REPORT_FD: str(report_fd)}
    fds = [plans_fd, report_fd, *(fd for plan in plans for fd in plan.pass_fds)]
    return RankPlan(first.rank, first.command, first.cwd, env, first.log, fds)


def _as_dict(plan: RankPlan) -> dict[str, Any]:
    """The plan as a dict that can be written as JSON for the fork server."""
    return {
        "rank": plan.rank,
        "command": list(plan.command),
        "cwd": str(plan.cwd),
        "env": dict(plan.env),
        "log": str(plan.log),
        "pass_fds": list(plan.pass_fds),
    }
