"""Starting and ending DataLoader worker processes so that neither a stop nor a kill goes wrong.

Start method: **spawn**. By the first batch a rank has threads (the process group's, a side thread, thread pools) and sockets
(peers, rendezvous store). A forked child would inherit locks that nobody holds any more, and would keep those sockets open: the
peers of a killed rank would wait for an end of file that does not come. forkserver's children are not the rank's own children,
so they outlive it. Spawn costs an interpreter start with ``import torch`` per worker (one to two seconds), paid once per
attempt since workers persist over the epochs. As always with spawn, the data set, ``augment`` and ``collate_fn`` must be
importable, and a script needs ``if __name__ == "__main__":``.

Signals: what stops a job often goes to the whole process group. Workers ignore it: stopping is the rank's affair. They are
born with those signals blocked (a mask is inherited through exec), so there is no moment at which one could hit them.

Parent death: ``PR_SET_PDEATHSIG`` kills a worker with the thread that started it, so workers are started on the main thread.

Exit: multiprocessing ends the children of an exiting process by SIGTERM, and waits for them without a limit. Workers ignore it,
and they still run where a traceback holds the loader's iterator: they are killed before that.
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
from ratchet_worker.procs import die_with_parent

START_METHOD: Final = "spawn"
SHIELDED: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that a worker ignores; SIGKILL ends it."""


def init_worker(parent: int, worker_id: int) -> None:
    """First act of a worker: ignore what is meant for the rank, die with the rank (process id ``parent``)."""
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)
    die_with_parent(parent)


@contextmanager
def starting(into: list[BaseProcess]) -> Iterator[None]:
    """Start workers inside this block; they appear in ``into``. Raises ``UserError`` off the main thread.

    A signal that arrives meanwhile is not lost: another thread takes it, or this one when the block ends.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "iterate over data with num_workers > 0 on the main thread: workers die with their starting thread"
        )
    resource_tracker.ensure_running()  # here, because its start unblocks SIGINT and SIGTERM
    before = {child.pid for child in multiprocessing.active_children()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        yield
    finally:
        started = [child for child in multiprocessing.active_children() if child.pid not in before]
        util.Finalize(None, _kill_at_exit, [[weakref.ref(child) for child in started]], exitpriority=0)
        into.extend(started)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def kill(workers: list[BaseProcess], owner: int) -> None:
    """End ``workers`` at once and reap them: they hold nothing that is worth waiting for. No-op in other processes."""
    if os.getpid() != owner:
        return
    with _child_deaths_unnoticed():
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
    workers.clear()


def _kill_at_exit(started: list[weakref.ref[BaseProcess]]) -> None:
    kill([worker for ref in started if (worker := ref()) is not None], os.getpid())


@contextmanager
def _child_deaths_unnoticed() -> Iterator[None]:
    """torch's SIGCHLD handler raises in the main thread when a worker is killed; here that is what is wanted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: Any = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous if previous is not None else signal.SIG_DFL)
