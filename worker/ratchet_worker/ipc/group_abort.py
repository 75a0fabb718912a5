"""Aborts the communicators of the ranks that the agent is about to kill, before it kills the first of them.

If GPUs are connected by NVLink, a process that ends while a peer still reads or writes its memory makes the driver report a
fatal error (SXid 12028), and many clusters cordon the node. Therefore the agent first requests an abort. In each rank a
dedicated thread aborts all process groups, since the main thread may be stuck in a collective, and then halts the process with
SIGSTOP. The halt is the acknowledgement; a rank whose abort fails does not halt. A rank does not exit, because a peer that has
not aborted yet may still use its memory; the agent kills the ranks when all have halted, or when the time limit has passed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

ABORT_SIGNAL: Final = int(signal.SIGRTMIN) + 13
"""A real-time signal that neither torch nor the libraries that scripts commonly use reserve."""


def request_abort(pid: int, log: Path, text: str) -> None:
    """Request, as the agent, that rank process ``pid`` aborts its process groups; do not wait for it. ``text``: written to the
    rank's ``log`` first.

    The signal kills a rank that has not called ``GroupAbort.start`` yet; such a rank has no process group. No effect if the
    process has ended.
    """
    with suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(f"ratchet: {text}\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, ABORT_SIGNAL)


class GroupAbort:
    """The rank's side of an abort: a thread that waits for the agent's request, aborts all process groups and halts the
    process."""

    def __init__(self) -> None:
        self._aborting = False

    def start(self) -> None:
        """Start the thread that handles the agent's ``request_abort``. Call it in the main thread before any other thread is
        started: all threads must block the signal."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {ABORT_SIGNAL})
        threading.Thread(target=self._run, name="ratchet-abort", daemon=True).start()

    def block_if_aborting(self) -> None:
        """Block the calling thread forever if an abort has begun; otherwise return at once. May be called from any thread.

        A rank calls it before it publishes anything (a step's end, reports, its part of a save, its result), since an aborted
        NCCL collective returns without an error, with arbitrary values in its output.
        """
        if self._aborting:
            threading.Event().wait()

    def _run(self) -> None:
        """Wait for the signal, abort all process groups, and halt this process with SIGSTOP. If the abort fails, the error is
        logged and the process is not halted."""
        signal.sigwait({ABORT_SIGNAL})
        self._aborting = True
        torch_distributed = sys.modules.get("torch.distributed")
        is_initialized = getattr(torch_distributed, "is_initialized", None)  # absent while the module is being imported
        try:
            if is_initialized is not None and is_initialized():
                from ratchet_hooks.torch_compat import abort_groups

                _log(f"aborted {abort_groups()} process groups before the end")
        except BaseException as error:
            _log(f"the process groups could not be aborted: {type(error).__name__}: {error}")
            return
        os.kill(os.getpid(), signal.SIGSTOP)


def _log(text: str) -> None:
    """Write a line to the rank's log; a failure is ignored. Does not use ``print``: the main thread may hold the lock of
    ``sys.stderr``."""
    with suppress(OSError):
        os.write(2, f"ratchet: {text}\n".encode())
