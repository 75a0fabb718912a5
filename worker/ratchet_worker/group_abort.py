"""Aborting a rank's communicators before its agent kills it.

A process that ends while another GPU still reads its memory over NVLink makes the driver report a fatal error, and the node is
taken out of service. So before SIGKILL the agent asks the living ranks to abort. In each rank a thread that does nothing else
aborts all process groups and ends the process: the main thread may be stuck in a collective for minutes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Final

from ratchet_contract.exit_codes import EXIT_EXCEPTION

ABORT_SIGNAL: Final = int(signal.SIGRTMIN) + 13
"""A real-time signal that neither torch nor what scripts commonly use takes."""


def answer(way_out: threading.Lock) -> None:
    """In a rank's main thread, before it starts any other thread: from now on ``ask`` ends this process. ``way_out``: is held
    then, so that the main thread, whose collective fails by the abort, writes no result of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {ABORT_SIGNAL})
    threading.Thread(target=_answer, args=(way_out,), name="ratchet-abort", daemon=True).start()


def ask(pid: int) -> None:
    """In the agent. A rank that has not come to ``answer`` yet ends by the signal itself: it has no process group."""
    with suppress(ProcessLookupError):
        os.kill(pid, ABORT_SIGNAL)


def _answer(way_out: threading.Lock) -> None:
    signal.sigwait({ABORT_SIGNAL})
    way_out.acquire(blocking=False)  # else the rank is ending by itself
    _say("the agent ends this rank")
    torch_distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(torch_distributed, "is_initialized", None)  # while it is being imported, it has none
    try:
        if is_initialized is not None and is_initialized():
            from ratchet_hooks.torch_compat import abort_groups

            abort_groups()
            _say("it aborted its process groups")
    except BaseException as error:  # the process must end
        _say(f"its process groups could not be aborted: {type(error).__name__}: {error}")
    finally:
        os._exit(EXIT_EXCEPTION)


def _say(text: str) -> None:
    """To the rank's log, past Python's locks: the main thread may hold them."""
    with suppress(OSError):
        os.write(2, f"ratchet: {text}\n".encode())
