"""Starts and ends DataLoader worker processes. Workers ignore the signals that stop a job, and die with the rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any, Final

from ratchet_contract.errors import UserError
from ratchet_worker.ipc.child_processes import die_with_parent

# Of a TrainLoader's workers. A forked child would inherit locks whose holders do not exist in it, and the peers' sockets, which
# must close when the rank is killed. A forkserver's children are not the rank's own, and would outlive it.
START_METHOD: Final = "spawn"
IGNORED_SIGNALS: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that a worker ignores; SIGKILL ends it."""


def init_worker(parent: int, worker_id: int) -> None:
    """Initialise a worker, in its process: ignore signals meant for the rank, and die with the rank (process id ``parent``)."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    die_with_parent(parent)


@contextmanager
def starting_workers(workers: list[BaseProcess]) -> Iterator[None]:
    """Context manager: append workers started in the block to ``workers``, and have them killed when this process exits. Raises
    ``UserError`` outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "iterate over data with num_workers > 0 on the main thread: workers die with their starting thread"
        )
    resource_tracker.ensure_running()  # before the signals are blocked: its start unblocks SIGINT and SIGTERM
    before = {child.pid for child in multiprocessing.active_children()}
    # Workers inherit the mask: no signal can hit one before it ignores the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        started = [child for child in multiprocessing.active_children() if child.pid not in before]
        # multiprocessing would end workers by SIGTERM, which they ignore, and wait for them without a limit.
        util.Finalize(None, _kill_at_exit, [[weakref.ref(child) for child in started]], exitpriority=0)
        workers.extend(started)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def kill_workers(workers: list[BaseProcess], owner: int) -> None:
    """Kill ``workers``, wait for their death, and empty the list. Does nothing in processes other than ``owner`` (a process
    id)."""
    if os.getpid() != owner:
        return
    with _ignoring_child_deaths():
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
    workers.clear()


def _kill_at_exit(started: list[weakref.ref[BaseProcess]]) -> None:
    """Kill the ``started`` workers that still exist. Called when this process exits."""
    kill_workers([worker for ref in started if (worker := ref()) is not None], os.getpid())


@contextmanager
def _ignoring_child_deaths() -> Iterator[None]:
    """Context manager: disable torch's SIGCHLD handler, which would raise, while workers are killed on purpose. Does nothing
    outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: Any = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous if previous is not None else signal.SIG_DFL)
