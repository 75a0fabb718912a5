"""Wakes the agent's main thread on a rank's death, a signal, or a call from the report sender's thread."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Final

from ratchet_contract.phases import Cause

_STOP_CAUSES: Final = {signal.SIGTERM: Cause.SIGTERM, signal.SIGINT: Cause.SIGTERM, signal.SIGUSR1: Cause.TIME_LIMIT}
STOP_SIGNALS: Final = tuple(_STOP_CAUSES)


class WakeupPipe:
    """A pipe that interrupts the main thread's wait. ``wake`` may be called from any thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(self) -> None:
        """End the current or the next ``wait``. Does not block."""
        with suppress(BlockingIOError):  # pipe full: a wake-up is pending already
            os.write(self._write, b"\0")

    def wait(self, descriptors: Iterable[int], seconds: float) -> None:
        """Wait until one of ``descriptors`` is readable, ``wake`` was called, a handled signal arrives, or ``seconds`` pass. Does
        not say which."""
        poller = select.poll()
        for descriptor in (self._read, *descriptors):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(max(0.0, seconds) * 1000):
            if descriptor == self._read:
                os.read(self._read, 4096)

    def install_signal_handlers(self, on_stop: Callable[[Cause], None]) -> None:
        """Install the signal handlers and unblock all signals. A stop signal calls ``on_stop`` with its cause and ends a
        ``wait``, which a child that ends or halts ends, too."""

        def flag(number: int, _frame: FrameType | None) -> None:
            on_stop(_STOP_CAUSES[signal.Signals(number)])

        for number in STOP_SIGNALS:
            signal.signal(number, flag)
        # ignored, but not by SIG_IGN, which ranks would inherit
        for number in (signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
