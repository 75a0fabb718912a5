"""The fork server: a process that imports what ranks need, forks each rank (twice, so that the agent adopts it), and exits."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars as names
from ratchet_worker.coordination.stop_listener import STOP_SIGNALS
from ratchet_worker.host.cpu import gc_disabled
from ratchet_worker.ipc import stack_dump
from ratchet_worker.ipc.child_processes import die_with_parent
from ratchet_worker.ipc.log_lines import print_to_log

_TASKS: Final = Path("/proc/self/task")


def fork_ranks() -> None:
    """Fork one process for each rank of the agent's plans. Returns only in ranks' processes; the server exits. Raises
    ``OSError``."""
    die_with_parent(int(os.environ[names.AGENT_PID]))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    stack_dump.install_handlers()
    report = int(os.environ.pop(names.FORK_REPORT_FD))
    with open(int(os.environ.pop(names.FORK_PLANS_FD)), "rb") as file:
        file.seek(0)  # the offset is at the end, where the agent has left it
        plans, modules = json.load(file)
    forkable = _import(modules) and _is_single_threaded()
    gc.freeze()  # the collector does not scan frozen objects, so their pages stay shared
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
            _become_rank(plan, plans, report, forkable)
            return
        os.write(report, f"{plan['rank']} {pid}\n".encode())
        birth.release()
        pids.append(pid)
    for number in signal.sigpending() & set(STOP_SIGNALS):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    os._exit(0)


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


def _become_rank(plan: dict[str, Any], plans: list[dict[str, Any]], report: int, forkable: bool) -> None:
    """Turn this process into the rank of ``plan``, one of ``plans``. If not ``forkable``, replaces it by a new interpreter."""
    os.chdir(plan["cwd"])
    _redirect_output(plan["log"])
    for fd in {report, *(fd for other in plans for fd in other["pass_fds"])} - set(plan["pass_fds"]):
        os.close(fd)
    if not forkable:
        os.execve(plan["command"][0], plan["command"], plan["env"])
    # Only the rank's own variables: the shared ones stay as an import, or an interpreter start-up file, has left them.
    os.environ.update({k: v for k, v in plan["env"].items() if any(other["env"].get(k) != v for other in plans)})
    getattr(threading.main_thread(), "_set_native_id", lambda: None)()  # Python still has the server's thread id


def _redirect_output(path: str) -> None:
    """Append this process's stdout and stderr to the log ``path`` from now on, created if missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
