"""Aborts the communicators of the ranks that the agent is about to kill: where NVLink connects GPUs, a process that ends while a
peer uses its memory makes the driver report a fatal error. A rank that has aborted halts itself by SIGSTOP, as the
acknowledgement."""

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
    """Request that rank process ``pid`` aborts its process groups; write ``text`` to its ``log`` first. May kill a rank that is
    starting."""
    with suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(f"ratchet: {text}\n".encode())
    with suppress(ProcessLookupError):
        # Kills a rank that has not called ``GroupAbort.start`` yet; such a rank has no process group.
        os.kill(pid, ABORT_SIGNAL)


class GroupAbort:
    """The rank's side of an abort: a thread that, on request, aborts all process groups and halts the process."""

    def __init__(self) -> None:
        self._aborting = False

    def start(self) -> None:
        """Start the thread that handles ``request_abort``. Call it in the main thread before other threads start."""
        # All threads must block the signal, which they inherit.
        signal.pthread_sigmask(signal.SIG_BLOCK, {ABORT_SIGNAL})
        threading.Thread(target=self._run, name="ratchet-abort", daemon=True).start()

    def block_if_aborting(self) -> None:
        """Block the calling thread forever if an abort has begun. Call it before anything is published."""
        # An aborted NCCL collective returns without an error, with arbitrary values in its output.
        if self._aborting:
            threading.Event().wait()

    def _run(self) -> None:
        """Wait for the signal, abort all process groups, and halt this process with SIGSTOP, unless the abort fails."""
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
    """Write a line to the rank's log; a failure is ignored."""
    with suppress(OSError):
        # Not ``print``: the main thread may hold the lock of ``sys.stderr``.
        os.write(2, f"ratchet: {text}\n".encode())
