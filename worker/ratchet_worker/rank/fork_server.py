"""The fork server: a process that imports what ranks need, forks each rank (twice, so that the agent adopts it), and exits. The
server of a parked agent waits for its plans after the imports."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars as names
from ratchet_worker.coordination.stop_listener import STOP_SIGNALS
from ratchet_worker.host import huge_pages
from ratchet_worker.host.cpu import gc_disabled
from ratchet_worker.host.interpreter_shutdown import Inherited
from ratchet_worker.ipc import stack_dump
from ratchet_worker.ipc.child_processes import die_with_parent
from ratchet_worker.ipc.fork_server_messages import FORK_AGENT, OTHER_CODE, PING
from ratchet_worker.ipc.log_lines import print_to_log
from ratchet_worker.ipc.process_listing import show_variables, start_environment

_MAX_MESSAGE: Final = 1 << 16
_MAX_FDS: Final = 8
_TASKS: Final = Path("/proc/self/task")


def fork_ranks() -> Inherited:
    """Fork one process for each rank of the agent's plans. Returns only in ranks' processes, what they have inherited; the server
    exits. Raises ``OSError``."""
    parked = os.environ.pop(names.PARKED, None)
    die_with_parent(int(parked or os.environ[names.AGENT_PID]))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    stack_dump.install_handlers()
    started = start_environment()
    report = int(os.environ.pop(names.FORK_REPORT_FD))
    source = int(os.environ.pop(names.FORK_PLANS_FD))
    if parked is None:
        plans, modules = _read_plans(source)
        forkable = _import(modules) and _is_single_threaded()
        inherited = Inherited.current()
        gc.freeze()  # the collector does not scan frozen objects, so their pages stay shared
    else:
        report, plans, forkable, inherited = _wait_for_plans(source, report, started)
    pids = []
    for plan in plans:
        birth = _Birth()
        try:
            pid = birth.fork()
        except OSError:
            _redirect_output(plan["log"])  # the rank has logged nothing yet: the error goes to its log
            raise
        if pid is None:
            birth.wait()
            _become_rank(plan, plans, report, started if forkable else None)
            return inherited
        os.write(report, f"{plan['rank']} {pid}\n".encode())
        birth.release()
        pids.append(pid)
    for number in signal.sigpending() & set(STOP_SIGNALS):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    os._exit(0)


def _read_plans(fd: int) -> Any:
    """Return what the agent has written to the file ``fd``, and close it."""
    with open(fd, "rb") as file:
        file.seek(0)  # the offset is at the end, where the agent has left it
        return json.load(file)


def _wait_for_plans(fd: int, report: int, started: dict[str, str]) -> tuple[int, list[dict[str, Any]], bool, Inherited]:
    """Import what the agent names on the socket ``fd``, then wait for the plans. Return the pipe for this process's reports,
    ``report`` or that of a forked server, the plans, whether the ranks can be forked, and what they inherit without packages.
    Exits the process if the agent sends no plans. ``started``: the environment at the start."""
    agent = socket.socket(fileno=fd)
    given = json.loads(agent.recv(_MAX_MESSAGE))
    forkable = _import(given["modules"]) and _is_single_threaded()
    inherited = Inherited.current()
    gc.freeze()
    huge_pages.collapse()
    packages = given["packages"]
    if packages and _next_message(agent) == FORK_AGENT:  # an agent without the packages
        _, fds, _, _ = socket.recv_fds(agent, 1, _MAX_FDS)
        if (forked := _fork_agent(agent, report, fds, forkable)) is not None:
            (agent, report), packages = forked, []
    with_packages = forkable and _fork_with_packages(packages, given["code"])
    gc.freeze()
    files = _imported_paths()
    states = [_state(path) for path in files]
    message, fds = PING, list[int]()
    while True:
        if message == PING:
            with suppress(OSError):  # the agent has ended: there is nothing to receive
                agent.send(b"ready" if forkable else b"unfit")
        if with_packages and agent.recv(1, socket.MSG_PEEK) == OTHER_CODE:
            from ratchet_worker.rank import preload

            os._exit(preload.OTHER_CODE)  # the process that has forked this one takes the attempt
        message, fds, _, _ = socket.recv_fds(agent, 1, _MAX_FDS)
        if message == FORK_AGENT:
            is_current = forkable and [_state(path) for path in files] == states
            if (forked := _fork_agent(agent, report, fds, is_current)) is not None:
                agent, report = forked
                message = PING
        elif message != PING:
            break
    agent.close()
    if not fds:
        os._exit(0)
    plans, _ = _read_plans(fds[0])
    printed = Path("/proc/self/fd/1").read_bytes()  # by the imports, into a file without a name
    _redirect_output(plans[0]["log"])
    os.write(1, printed)
    passed = iter(fds[1:])
    for plan in plans:
        plan["pass_fds"] = [next(passed) for _ in plan["pass_fds"]]
        for number in plan["pass_fds"]:  # only rank 0 has one: the store's
            os.set_inheritable(number, True)
            plan["env"][names.STORE_FD] = str(number)
    shared = {k: v for k, v in plans[0]["env"].items() if all(plan["env"].get(k) == v for plan in plans)}
    why = None
    if not forkable:
        why = "the parked process cannot fork ranks"
    elif [_state(path) for path in files] != states:
        why = "a file that the parked process has imported was changed since"
    elif _uses_cuda():
        why = "an import has called CUDA's driver"
    elif not show_variables(names.PARKED, {k: v for k, v in shared.items() if started.get(k) != v}):
        why = "the attempt's variables do not fit into the parked process"
    if why is not None:
        _report_not_forked(why)
        for plan in plans:
            plan["env"][names.START] = f"cold: {why}"
    return report, plans, why is None, inherited


def _next_message(agent: socket.socket) -> bytes:
    """Return the first byte of the next message without taking it; empty if there is none yet."""
    try:
        return agent.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _fork_agent(
    agent: socket.socket, report: int, fds: list[int], is_current: bool
) -> tuple[socket.socket, int] | None:
    """Fork a process that becomes another parked agent, and a fork server for it, which has the imports of this one. Return None
    in this process, and in the new server its socket to the new agent and the pipe for its reports. ``agent``, ``report``: those
    of this process. ``fds``: of the new agent: its socket to the launcher, its output, and a file with its command, environment
    and directory. They are closed here: the launcher then sees if no agent was forked. ``is_current``: False if none can be."""
    try:
        if is_current:
            between = os.fork()
            if between == 0:
                ended = os.pidfd_open(os.getpid())
                try:
                    if os.fork() != 0:
                        os._exit(0)
                    agent.close()
                    os.close(report)
                    return _become_agent(ended, *fds)
                except OSError as error:
                    print_to_log(f"ratchet: no parked agent is forked: {error}")
                    os._exit(1)
            os.waitpid(between, 0)
    except OSError as error:
        print_to_log(f"ratchet: no parked agent is forked: {error}")
    finally:
        for fd in fds:
            os.close(fd)
    return None


def _become_agent(ended: int, launcher: int, output: int, file: int) -> tuple[socket.socket, int]:
    """In the new agent's process: fork its server, in which this returns as ``_fork_agent``. After the launcher's first message,
    execute the agent's command. ``ended``: descriptor that becomes readable at the end of the process that has forked this one.
    Raises ``OSError``."""
    os.setsid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reports, report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(report, True)
    agent = os.getpid()
    server = os.fork()
    if server == 0:
        os.setsid()
        die_with_parent(agent)
        ours.close()
        os.close(reports)
        os.close(ended)
        multiprocessing.current_process().authkey = os.urandom(32)
        return theirs, report
    try:
        imports_output = os.dup(1)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # An agent adopts, and ends with its attempt, what its descendants leave behind. The forking one has no attempt yet.
        select.select([ended], [], [])
        with socket.socket(fileno=os.dup(launcher)) as channel:
            channel.send(b"forked")
            channel.recv(1, socket.MSG_PEEK)  # the start of an interpreter waits until the launcher's own work is done
        with open(file, "rb") as plan:
            plan.seek(0)
            new = json.load(plan)
        with suppress(OSError):  # it was deleted
            os.chdir(new["cwd"])
        passed = launcher, ours.fileno(), reports, imports_output
        for fd in passed:
            os.set_inheritable(fd, True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(new["command"][0], [*new["command"], ",".join(map(str, (*passed, server))), new["room"]], new["env"])
    except OSError as error:
        print_to_log(f"ratchet: the parked agent is not started: {error}")
    finally:
        os._exit(1)


def _fork_with_packages(packages: list[str], code: list[str]) -> bool:
    """As ``preload.fork_with_packages``."""
    from ratchet_worker.rank import preload  # torch

    return bool(packages) and preload.fork_with_packages(packages, code)


def _uses_cuda() -> bool:
    """As ``preload.uses_cuda``."""
    from ratchet_worker.rank import preload  # torch

    return preload.uses_cuda()


def _imported_paths() -> list[Path]:
    """Return the files that modules were imported from, and the directories on the import path."""
    modules = list(sys.modules.values())
    found = {file for module in modules if isinstance(file := getattr(module, "__file__", None), str)}
    return [Path(path) for path in found | set(sys.path)]


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and time of change of the file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _import(modules: list[str]) -> bool:
    """Import ``modules``. Returns False if that raises an ``Exception``, after printing why."""
    try:
        with gc_disabled():
            for module in modules:
                importlib.import_module(module)
    # Each rank hits the error in an interpreter of its own and reports it.
    except Exception as error:
        _report_not_forked(f"{type(error).__name__}: {error}")
        return False
    return True


def _is_single_threaded() -> bool:
    """True if the server has a single thread after a trial fork; else prints that ranks are not forked, and why."""
    # OpenBLAS ends its threads before a fork, so one process is forked and ended first.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    # Other threads do not survive a fork, but the locks that they hold do.
    threads = len(list(_TASKS.iterdir()))
    if threads > 1:
        _report_not_forked(f"an import has left {threads - 1} threads running")
    return threads == 1


def _report_not_forked(reason: str) -> None:
    """Write to stderr that ranks are not forked, so that each imports torch for itself, and why."""
    print_to_log(f"ratchet: ranks are not forked, each imports torch for itself: {reason}")


class _Birth:
    """One rank's double fork: the process between server and rank ends at once, so that the agent adopts the rank."""

    def __init__(self) -> None:
        self._pid_read_fd, self._pid_write_fd = os.pipe()
        self._release_read_fd, self._release_write_fd = os.pipe()

    def fork(self) -> int | None:
        """Fork the rank's process. Returns its pid in the server, None in the new process. Raises ``OSError``, in the server."""
        between = os.fork()
        if between == 0:
            try:
                if os.fork() != 0:
                    os._exit(0)
                os.setsid()
                os.write(self._pid_write_fd, str(os.getpid()).encode())
            except OSError:
                os._exit(1)
            return None
        os.close(self._pid_write_fd)
        os.close(self._release_read_fd)
        told = os.read(self._pid_read_fd, 32)
        os.waitpid(between, 0)
        if not told:
            raise OSError(
                "no process could be forked for a rank, or it was killed at once: see the limits of processes and memory"
            )
        return int(told)

    def release(self) -> None:
        """In the server: have the rank's process continue, and close the descriptors. No error if that process has been
        killed."""
        with suppress(BrokenPipeError):  # the rank has been killed: the agent notices that and ends the others
            os.write(self._release_write_fd, b"\0")
        os.close(self._release_write_fd)
        os.close(self._pid_read_fd)

    def wait(self) -> None:
        """In the rank's process: wait for ``release``, and close the descriptors. Exits the process if the server has died
        before."""
        os.close(self._pid_read_fd)
        os.close(self._release_write_fd)
        if not os.read(self._release_read_fd, 1):
            os._exit(1)
        os.close(self._pid_write_fd)
        os.close(self._release_read_fd)


def _become_rank(
    plan: dict[str, Any], plans: list[dict[str, Any]], report: int, started: dict[str, str] | None
) -> None:
    """Turn this process into the rank of ``plan``, one of ``plans``. ``started``: the environment that the server was started
    with; None: the rank cannot be forked, and a new interpreter replaces this process."""
    os.chdir(plan["cwd"])
    _redirect_output(plan["log"])
    for fd in {report, *(fd for other in plans for fd in other["pass_fds"])} - set(plan["pass_fds"]):
        os.close(fd)
    if started is None:
        os.execve(plan["command"][0], plan["command"], plan["env"])
    # Only what the server does not have: the rest stays as an import, or an interpreter start-up file, has left it.
    os.environ.update({k: v for k, v in plan["env"].items() if started.get(k) != v})
    getattr(threading.main_thread(), "_set_native_id", lambda: None)()  # Python still has the server's thread id


def _redirect_output(path: str) -> None:
    """Append this process's stdout and stderr to the log ``path`` from now on, created if missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
