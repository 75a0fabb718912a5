"""What wakes the agent's main thread: a rank's death, a signal, the uplink's thread."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Final

from ratchet_contract.phases import Cause

_STOPS: Final = {signal.SIGTERM: Cause.SIGTERM, signal.SIGINT: Cause.SIGTERM, signal.SIGUSR1: Cause.TIME_LIMIT}
STOP_SIGNALS: Final = tuple(_STOPS)


class Waking:
    """``wake`` from any thread; the rest is the main thread's."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # full: it is awake
            os.write(self._write, b"\0")

    def wait(self, descriptors: Iterable[int], seconds: float) -> None:
        """Until one of ``descriptors`` is readable, somebody wakes us, or ``seconds`` pass."""
        poller = select.poll()
        for descriptor in (self._read, *descriptors):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(max(0.0, seconds) * 1000):
            if descriptor == self._read:
                os.read(self._read, 4096)

    def take_signals(self, told: Callable[[Cause], None]) -> None:
        """Those that ask for a stop only call ``told``. No ``SIG_IGN`` anywhere: ranks would inherit it."""

        def flag(number: int, _frame: FrameType | None) -> None:
            told(_STOPS[signal.Signals(number)])

        for number in STOP_SIGNALS:
            signal.signal(number, flag)
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
