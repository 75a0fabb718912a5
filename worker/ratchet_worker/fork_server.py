"""The process that ranks are forked from: it imports what they need, forks each twice, so that the agent adopts it, and ends.

A rank begins with nothing of it but the imports: session, log, variables and descriptors are the plan's, no thread and no
descriptor of the server's is left, and stop signals wait until it listens. Signals that the server got meanwhile are handed on.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_contract import environment as names
from ratchet_worker import stacks
from ratchet_worker.imports import uncollected
from ratchet_worker.listener import STOP_SIGNALS
from ratchet_worker.procs import die_with_parent

_TASKS: Final = Path("/proc/self/task")


def serve() -> None:
    """Returns once in the process of each rank, as that rank; never in the server's own.

    Raises ``OSError`` when no process can be forked.
    """
    die_with_parent(int(os.environ[names.AGENT_PID]))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    stacks.answer()
    report = int(os.environ.pop(names.FORK_REPORT_FD))
    with open(int(os.environ.pop(names.FORK_PLANS_FD)), "rb") as file:
        file.seek(0)  # the agent has written it
        plans, modules = json.load(file)
    forkable = _import(modules) and _is_alone()
    gc.freeze()  # what the collector does not look at, it does not copy
    pids = []
    for plan in plans:
        birth = _Birth()
        try:
            pid = birth.give()
        except OSError:
            _write_to(plan["log"])  # it has told nothing yet: this is what became of it
            raise
        if pid is None:
            birth.wait()
            _become(plan, plans, report, forkable)
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
    """False where that fails: each rank then meets the error in an interpreter of its own, and tells it."""
    try:
        with uncollected():
            for module in modules:
                importlib.import_module(module)
    except Exception as error:
        _tell(f"{type(error).__name__}: {error}")
        return False
    return True


def _is_alone() -> bool:
    """No thread lives through a fork, but the locks that it holds do. (Those of OpenBLAS end themselves before one.)"""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = len(list(_TASKS.iterdir()))
    if threads > 1:
        _tell(f"an import has left {threads - 1} threads running")
    return threads == 1


def _tell(reason: str) -> None:
    print(f"ratchet: ranks are not forked, each imports torch for itself: {reason}", file=sys.stderr, flush=True)


class _Birth:
    """One fork. ``give`` returns the new process's pid, and None in that process, which then waits to be released: that comes
    when the agent is its parent, and never when the server has died before."""

    def __init__(self) -> None:
        self._told, self._tell = os.pipe()
        self._released, self._release = os.pipe()

    def give(self) -> int | None:
        between = os.fork()
        if between == 0:
            try:
                if os.fork() != 0:
                    os._exit(0)
                os.setsid()
                os.write(self._tell, str(os.getpid()).encode())
            except OSError:
                os._exit(1)
            return None
        os.close(self._tell)
        os.close(self._released)
        told = os.read(self._told, 32)
        os.waitpid(between, 0)
        if not told:
            raise OSError(
                "no process could be forked for a rank, or it was killed at once: see the limits of processes and memory"
            )
        return int(told)

    def release(self) -> None:
        with suppress(BrokenPipeError):  # it has been killed: the agent sees that, and ends the others
            os.write(self._release, b"\0")
        os.close(self._release)
        os.close(self._told)

    def wait(self) -> None:
        os.close(self._told)
        os.close(self._release)
        if not os.read(self._released, 1):
            os._exit(1)
        os.close(self._tell)
        os.close(self._released)


def _become(plan: dict[str, Any], plans: list[dict[str, Any]], report: int, forkable: bool) -> None:
    os.chdir(plan["cwd"])
    _write_to(plan["log"])
    for fd in {report, *(fd for other in plans for fd in other["pass_fds"])} - set(plan["pass_fds"]):
        os.close(fd)
    if not forkable:
        os.execve(plan["command"][0], plan["command"], plan["env"])
    # Its own alone: others are as an import, or a start-up file of the interpreter, has left them.
    os.environ.update({k: v for k, v in plan["env"].items() if any(other["env"].get(k) != v for other in plans)})
    getattr(threading.main_thread(), "_set_native_id", lambda: None)()  # Python takes it for the server's still


def _write_to(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
