"""Starts ranks by forking one process that has imported torch (``fork_server``): that import is nearly all of a rank's start-up
time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from ratchet_contract import env_vars as names
from ratchet_worker.agent.rank_starter import Child, RankPlan, RankProcess, Starter, start_process
from ratchet_worker.ipc.fork_server_messages import FORK_AGENT, OTHER_CODE, PING, SAME_CODE
from ratchet_worker.ipc.log_lines import log_message

_ANSWER_SECONDS: Final = 1.0
_LISTING_BYTES: Final = 1 << 14  # for the variables that all ranks of an attempt share, mostly paths


class ForkingStarter:
    """Starts ranks that use no CUDA by forking. ``modules`` are imported before the forks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        """Start the fork server with all plans, and return the ranks. Raises ``OSError`` if the server cannot be started."""
        with _plans_file(plans, self._modules) as file:
            process, report = _start_server(_server_plan(plans), file.fileno())
        return _forked(process, report, plans)


@dataclass(frozen=True)
class Preload:
    """What a parked fork server imports: ``modules`` as for ``ForkingStarter``; of ``packages``, modules that code in the
    directories ``code`` has imported, those that can be imported in advance."""

    modules: Sequence[str]
    packages: Sequence[str] = ()
    code: Sequence[str] = ()


@dataclass(frozen=True)
class ParkedServer:
    """A fork server without plans. ``socket``: to it; ``report``: the pipe of its reports; ``output``: file of what its imports
    print."""

    process: Child
    socket: socket.socket
    report: int
    output: int

    @classmethod
    def start(cls, command: Sequence[str], env: Mapping[str, str], preload: Preload) -> ParkedServer:
        """Start a server with the environment ``env`` and the command ``command``. Raises ``OSError``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.memfd_create("output", os.MFD_CLOEXEC)
        with theirs:
            parked = {**env, names.PARKED: str(os.getpid()).ljust(_LISTING_BYTES)}
            plan = RankPlan(0, command, Path("/"), parked, Path(f"/proc/self/fd/{output}"))
            process, report = _start_server(plan, theirs.fileno())
        ours.send(json.dumps(asdict(preload)).encode())
        return cls(process, ours, report, output)

    @classmethod
    def inherited(cls, control: int, report: int, output: int, pid: int) -> ParkedServer:
        """Return the server ``pid``, which was forked as a child of this process before this process's program was executed
        (``rank.fork_server``). The others are inherited descriptors."""
        for fd in (control, report, output):
            os.set_inheritable(fd, False)
        return cls(Child(0, pid), socket.socket(fileno=control), report, output)

    def fork_agent(self, fds: Sequence[int], agent: Mapping[str, Any]) -> None:
        """Have the server fork another parked agent, with a server like this one. ``fds``: its socket to the launcher, and its
        output; ``agent``: its ``command``, ``room`` (the last argument), ``env`` and ``cwd``. Raises ``OSError``."""
        with _memory_file(agent) as file:
            socket.send_fds(self.socket, [FORK_AGENT], [*fds, file.fileno()])


class ParkedStarter:
    """Starts ranks by ``server``, whose environment is ``env``. If their plans do not fit it, ``cold`` starts them.
    ``same_code``: the plans are of the code that has imported the packages."""

    def __init__(self, server: ParkedServer, env: Mapping[str, str], cold: Starter) -> None:
        self.same_code = False
        self._cold, self._env = cold, env
        self._process, self._socket, self._report = server.process, server.socket, server.report
        self._output = Path(f"/proc/self/fd/{server.output}")
        self._ready = False

    @property
    def pid(self) -> int:
        """The pid of the fork server."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor from which ``is_ready`` reads."""
        return self._socket.fileno()

    def is_ready(self) -> bool:
        """True if the server can fork ranks; False, after what it has printed was printed here, if it cannot. Blocks during its
        imports."""
        self._ready = self._socket.recv(16) == b"ready"
        if self._ready:
            return True
        log_message(self._output.read_text(errors="replace"))
        return False

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        """Return the ranks, forked by the server or, if it does not fit, started as by ``ForkingStarter``. Raises ``OSError``."""
        misfit = self._misfit(plans)
        os.close(int(self._output.name))
        with self._socket:
            if misfit is None:
                with _plans_file(plans, []) as file:
                    passed = [fd for plan in plans for fd in plan.pass_fds]
                    message = SAME_CODE if self.same_code else OTHER_CODE
                    socket.send_fds(self._socket, [message], [file.fileno(), *passed])
                # an answer that is unread when the socket is closed would reset the connection before the plans are read
                with suppress(OSError):  # the server has ended
                    self._socket.shutdown(socket.SHUT_RD)
                    while self._socket.recv(16):
                        pass
                return _forked(self._process, self._report, plans)
        log_message(f"start of the ranks: cold: {misfit}")
        os.close(self._report)
        self._process.kill_group()
        self._process.reap()
        return self._cold.start([replace(plan, env={**plan.env, names.START: f"cold: {misfit}"}) for plan in plans])

    def _misfit(self, plans: Sequence[RankPlan]) -> str | None:
        """Return why the server cannot fork the ranks of ``plans``; None if it can."""
        if self._process.exit_code() is not None:
            return "the parked process has ended"
        if self._ready:  # else it still makes its imports
            self._socket.settimeout(_ANSWER_SECONDS)
            try:
                self._socket.send(PING)
                self._socket.recv(16)
            except OSError:
                return "the parked process does not answer"
        envs = [self._env, *(plan.env for plan in plans)]
        names_set = {name for env in envs for name in env if not _is_set_after_fork(name)}
        different = sorted(name for name in names_set if len({env.get(name) for env in envs}) > 1)
        return f"the parked process has other values of {', '.join(different)}" if different else None


def _is_set_after_fork(name: str) -> bool:
    """True if a forked rank gets the variable ``name`` after the fork: nothing reads it at an interpreter's start or import."""
    return name.startswith(names.RESERVED_PREFIXES) or name in names.SET_AFTER_FORK


class _Server:
    """The agent's side of the fork server: the ranks that have been forked so far. ``report``: the pipe of the server's
    reports."""

    def __init__(self, process: Child, report: int, plans: Sequence[RankPlan]) -> None:
        self._process, self._report = process, report
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


def _server_plan(plans: Sequence[RankPlan]) -> RankPlan:
    """Return the plan of the fork server: the first rank's, with all descriptors and the variables that all ranks share."""
    first = plans[0]
    shared = {k: v for k, v in first.env.items() if all(plan.env.get(k) == v for plan in plans)}
    return replace(first, env=shared, pass_fds=[fd for plan in plans for fd in plan.pass_fds])


def _start_server(plan: RankPlan, plans_fd: int) -> tuple[Child, int]:
    """Start the fork server of ``plan``, which reads its plans from ``plans_fd``, and return it and the pipe of its reports.
    Raises ``OSError``."""
    reports, report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.set_blocking(report, True)
        # in front: the variable that is overwritten must stay the last one
        env = {names.FORK_PLANS_FD: str(plans_fd), names.FORK_REPORT_FD: str(report), **plan.env}
        return start_process(replace(plan, env=env, pass_fds=[plans_fd, report, *plan.pass_fds])), reports
    except BaseException:
        os.close(reports)
        raise
    finally:
        os.close(report)


def _plans_file(plans: Sequence[RankPlan], modules: Sequence[str]) -> BinaryIO:
    """Return a file with the plans and modules for the server; the caller closes it. Raises ``OSError``."""
    return _memory_file([[_as_dict(plan) for plan in plans], list(modules)])


def _memory_file(content: object) -> BinaryIO:
    """Return a file with ``content`` as JSON; the caller closes it. Raises ``OSError``."""
    file = os.fdopen(os.memfd_create("plans", os.MFD_CLOEXEC), "wb")  # contains secrets: never on a disk
    file.write(json.dumps(content).encode())
    file.flush()
    return file


def _forked(process: Child, report: int, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
    """Return the ranks that the fork server ``process`` forks."""
    server = _Server(process, report, plans)
    return (_Forked(plan.rank, server) for plan in plans)


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
