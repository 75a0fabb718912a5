"""Starts and ends DataLoader worker processes so that both a stop and a kill of the rank are safe.

Start method of a ``TrainLoader``'s workers: **spawn**. By the first batch a rank has threads (the process group's, a side thread,
thread pools) and sockets (peers, rendezvous store). A forked child would inherit locks whose holders do not exist in it, and
would keep those sockets open: the peers of a killed rank would wait for an end of file that does not come. forkserver's children
are not the rank's own children, so they would outlive it. Spawn costs an interpreter start with ``import torch`` per worker (one
to two seconds), paid once per attempt since workers persist over the epochs. As always with spawn, the data set, ``augment`` and
``collate_fn`` must be importable, and a script needs ``if __name__ == "__main__":``. A prepared DataLoader keeps its own start
method, and its workers persist only if its ``persistent_workers`` is True.

Signals: the signal that stops a job often goes to the whole process group. Workers ignore it: the rank handles the stop. They
start with those signals blocked (a mask is inherited through exec), so no signal can hit them before they ignore it.

Parent death: ``PR_SET_PDEATHSIG`` kills a worker when the thread that started it dies, so workers are started on the main thread.

Exit: multiprocessing ends the children of an exiting process by SIGTERM, and waits for them without a limit. Workers ignore
SIGTERM, and still run where a traceback holds the loader's iterator: they are killed before multiprocessing waits for them.
"""

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
from ratchet_worker.ipc.procfs import die_with_parent

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
    """Context manager: add the worker processes started inside the block to ``workers``, and register them to be killed at
    exit. Signals in ``IGNORED_SIGNALS`` are blocked in the block. Raises ``UserError`` in another thread than the main one.

    A signal that arrives in the block is not lost: another thread receives it, or this one when the block ends.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "iterate over data with num_workers > 0 on the main thread: workers die with their starting thread"
        )
    resource_tracker.ensure_running()  # before the signals are blocked: its start unblocks SIGINT and SIGTERM
    before = {child.pid for child in multiprocessing.active_children()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        started = [child for child in multiprocessing.active_children() if child.pid not in before]
        util.Finalize(None, _kill_at_exit, [[weakref.ref(child) for child in started]], exitpriority=0)
        workers.extend(started)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def kill_workers(workers: list[BaseProcess], owner: int) -> None:
    """Kill ``workers``, wait for their death, and empty the list. Their unfinished batches are lost. Does nothing in processes
    other than ``owner`` (a process id)."""
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
    """Context manager: disable torch's SIGCHLD handler in the block, which kills workers on purpose: the handler would raise in
    the main thread. No effect in another thread than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: Any = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous if previous is not None else signal.SIG_DFL)
