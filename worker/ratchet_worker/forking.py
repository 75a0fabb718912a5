"""Ranks forked from one process that has imported torch (``fork_server``): importing it is nearly all that a rank has to wait for
before its first step, and takes as much CPU time and memory again for each that does it for itself.

Until a rank is there, the server stands for it: its pid, its death, its stacks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ratchet_contract import environment as names
from ratchet_worker.files import say
from ratchet_worker.starter import Child, RankPlan, RankProcess, start_process


class ForkingStarter:
    """For ranks that use no CUDA: a process that has touched it cannot be forked, and what a rank imports might. ``modules`` are
    imported for all of them."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        server = _Server(plans, self._modules)
        return (_Forked(plan.rank, server) for plan in plans)


class _Server:
    """The agent's side: who has been forked so far."""

    def __init__(self, plans: Sequence[RankPlan], modules: Sequence[str]) -> None:
        self._report, report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with os.fdopen(
                os.memfd_create("plans", os.MFD_CLOEXEC), "wb"
            ) as file:  # secrets are in it: never on a disk
                file.write(json.dumps([[_as_dict(plan) for plan in plans], list(modules)]).encode())
                file.flush()
                os.set_blocking(report, True)
                self._process = start_process(_server_plan(plans, file.fileno(), report))
        except BaseException:
            os.close(self._report)
            raise
        finally:
            os.close(report)
        self._unread = b""
        self._born: dict[int, Child] = {}
        self._waiting = {plan.rank for plan in plans}

    def stands_for(self, rank: int) -> Child:
        """The rank's process, or the server while there is none."""
        self._look()
        return self._born.get(rank, self._process)

    def is_born(self, rank: int) -> bool:
        return self.stands_for(rank) is not self._process

    def wakes(self, rank: int) -> int:
        """What becomes readable when there is something new about ``rank``: of one to come, the report."""
        process = self.stands_for(rank)
        return self._report if process is self._process and process.exit_code() is None else process.fileno()

    def end(self) -> None:
        """No rank is forked after this; those that were are known. A rank that was not reported yet ends by itself."""
        self._process.kill_group()
        if self._process.exit_code() is None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._look()

    def _look(self) -> None:
        """Read what the server tells. When all are there it ends, and is collected as an orphan is: nobody waits for it, whatever
        may hold it up."""
        if not self._waiting:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._report, 4096):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            rank, pid = map(int, line.split())
            # A zombie, if it has ended: whoever was reported is this process's child.
            self._born[rank] = Child(rank, pid)
            self._waiting.discard(rank)
            say(f"rank {rank} is process {pid}")
        if not self._waiting:
            os.close(self._report)
            os.close(self._process.fileno())


class _Forked:
    """A rank, from the moment its server is started."""

    def __init__(self, rank: int, server: _Server) -> None:
        self._rank, self._server = rank, server

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def pid(self) -> int:
        return self._server.stands_for(self._rank).pid

    def fileno(self) -> int:
        return self._server.wakes(self._rank)

    def exit_code(self) -> int | None:
        code = self._server.stands_for(self._rank).exit_code()
        # A server that has ended may have told of this rank since it was asked: then that is not the rank's end.
        return None if code is None else self._server.stands_for(self._rank).exit_code()

    def kill_group(self) -> None:
        if not self._server.is_born(self._rank):
            self._server.end()
        self._server.stands_for(self._rank).kill_group()

    def ask_for_stacks(self) -> None:
        self._server.stands_for(self._rank).ask_for_stacks()

    def reap(self) -> None:
        self._server.stands_for(self._rank).reap()


def _server_plan(plans: Sequence[RankPlan], plans_fd: int, report_fd: int) -> RankPlan:
    """The first rank's process, but with the variables that all ranks share, and every rank's descriptors. What libraries read
    when they are loaded (OMP_NUM_THREADS), and the interpreter when it starts (PYTHONHASHSEED), is among them."""
    first = plans[0]
    shared = {k: v for k, v in first.env.items() if all(plan.env.get(k) == v for plan in plans)}
    env = shared | {names.FORK_PLANS_FD: str(plans_fd), names.FORK_REPORT_FD: str(report_fd)}
    fds = [plans_fd, report_fd, *(fd for plan in plans for fd in plan.pass_fds)]
    return RankPlan(first.rank, first.command, first.cwd, env, first.log, fds)


def _as_dict(plan: RankPlan) -> dict[str, Any]:
    return {
        "rank": plan.rank,
        "command": list(plan.command),
        "cwd": str(plan.cwd),
        "env": dict(plan.env),
        "log": str(plan.log),
        "pass_fds": list(plan.pass_fds),
    }
