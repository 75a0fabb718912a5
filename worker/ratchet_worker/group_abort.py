"""Aborting the communicators of all living ranks before the agent kills the first of them.

Where GPUs are connected by NVLink, a process that ends while a peer still reads or writes its memory makes the driver report a
fatal error (SXid 12028), and the node is taken out of service. Therefore the agent first asks the ranks to abort. In each rank a
thread that does nothing else aborts all process groups, since the main thread may be stuck in a collective, and then halts the
process by SIGSTOP. A halted rank is the acknowledgement; one whose abort fails does not halt. A rank does not exit, because one
that has not aborted yet may still use its memory; the agent kills the ranks when all have halted, or when their time is over.
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
"""A real-time signal that neither torch nor what scripts commonly use takes."""


def ask(pid: int, log: Path, text: str) -> None:
    """In the agent: write ``text`` to the rank's ``log`` and ask the rank to abort. A rank that has not called ``answer`` yet
    ends by the signal itself; it has no process group."""
    with suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(f"ratchet: {text}\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, ABORT_SIGNAL)


class GroupAbort:
    """The rank's side."""

    def __init__(self) -> None:
        self._begun = False

    def answer(self) -> None:
        """From now on ``ask`` halts this process. Call it in the main thread before any other thread is started: all threads must
        block the signal."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {ABORT_SIGNAL})
        threading.Thread(target=self._answer, name="ratchet-abort", daemon=True).start()

    def hold(self) -> None:
        """Return at once, or never after an abort has begun. Called before a rank publishes anything (a step's end, reports, its
        part of a save, its result): NCCL ends an aborted collective without an error, with arbitrary values in its output. Any
        thread."""
        if self._begun:
            threading.Event().wait()

    def _answer(self) -> None:
        signal.sigwait({ABORT_SIGNAL})
        self._begun = True
        torch_distributed = sys.modules.get("torch.distributed")
        is_initialized = getattr(torch_distributed, "is_initialized", None)  # absent while the module is being imported
        try:
            if is_initialized is not None and is_initialized():
                from ratchet_hooks.torch_compat import abort_groups

                _say(f"aborted {abort_groups()} process groups before the end")
        except BaseException as error:
            _say(f"the process groups could not be aborted: {type(error).__name__}: {error}")
            return
        os.kill(os.getpid(), signal.SIGSTOP)


def _say(text: str) -> None:
    """To the rank's log. Not by ``print``: the main thread may hold the lock of ``sys.stderr``."""
    with suppress(OSError):
        os.write(2, f"ratchet: {text}\n".encode())
