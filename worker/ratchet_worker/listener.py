"""What reaches a rank from outside: signals, which only set a flag, and ``control.json``. Without torch: set up first of all.

A Python signal handler runs between two bytecodes of the main thread, which may be inside a collective for minutes; the wake-up
descriptor is written by the C handler at once, and a side thread reads it.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_contract.messages import Control
from ratchet_contract.phases import Cause, Desired
from ratchet_worker import stacks
from ratchet_worker.control import ControlReader
from ratchet_worker.group_abort import GroupAbort
from ratchet_worker.results import default_cause

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Listener:
    """Call ``install`` on the main thread; ``wait`` from one other thread."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signalled = False
        self.terminated = False  # this process got a SIGTERM, and
        self._caught = False  # it was ours to catch, not a script's handler's
        self._reader: ControlReader | None = None
        self._control = Control()
        self._masks = threading.local()  # of a thread that forks
        self._taken = False  # signals are ours
        self._before: dict[int, Any] = {}  # handlers that were there
        self._passes_on = False
        self.interrupts = 0  # SIGINTs so far
        self.abort = GroupAbort()

    def install(self) -> None:
        """Handlers for SIGTERM and SIGINT, for who asks for the stacks, and for the agent that asks for an abort."""
        self.take_signals()
        faulthandler.enable()
        stacks.answer()
        self.abort.answer()

    def take_signals(self) -> Callable[[], None]:
        """Handlers for SIGTERM and SIGINT; what is returned puts those back that were there, where nobody has put others in their
        place, and ends what ``wait`` hears."""
        wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        self._taken = True
        # A process that the script forks shares the wake-up descriptor: a pool that ends its workers by SIGTERM would stop the
        # job, and workers that only set a flag would never end. A signal that comes before the child has let go waits.
        os.register_at_fork(before=self._hold, after_in_parent=self._unhold, after_in_child=self._let_go)

        def give_back() -> None:
            self._taken = False
            signal.set_wakeup_fd(wakeup)
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._remember:
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

        return give_back

    def follow(self, control_file: Path, first: Desired) -> None:
        """Read wishes from ``control_file`` too, beginning with what the launch asked for."""
        self._reader = ControlReader(control_file)
        self._control = Control(desired=first)

    def wait(self, seconds: float) -> tuple[Cause | None, int]:
        """Up to ``seconds`` for a signal; then ``(cause of the stop that is wanted, number of "save now")`` as known now."""
        readable, _, _ = select.select([self._read_fd], [], [], seconds)
        if readable:
            numbers = os.read(self._read_fd, 4096)
            self.interrupts += numbers.count(signal.SIGINT)
            self._signalled = self._signalled or any(n in numbers for n in STOP_SIGNALS)
            self.terminated = self.terminated or signal.SIGTERM in numbers
        if self._reader is not None:
            self._control = self._reader.poll() or self._control
        return self._cause(), self._control.checkpoint_request

    def _cause(self) -> Cause | None:
        if self._control.desired is not Desired.RUN:
            return self._control.cause or default_cause(self._control.desired)
        return Cause.SIGTERM if self._signalled else None

    def pass_on_interrupt(self) -> bool:
        """Give the main thread a SIGINT for the handler that was there before ours (``KeyboardInterrupt``). Any thread; False:
        there was none, or it has had one."""
        if self._passes_on or not callable(self._before.get(signal.SIGINT)):
            return False
        self._passes_on = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return True

    def script_handles_sigterm(self) -> bool:
        """Has a script put a handler of its own in the place of ours?"""
        found = signal.getsignal(signal.SIGTERM)
        return callable(found) and found != self._remember

    def terminate_script(self) -> None:
        """Give the main thread a SIGTERM for the script's own handler, unless that has had one from outside."""
        if not self.terminated or self._caught:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def retake(self) -> None:
        """The script is over. A handler of its own that is still to run would raise in our code: it runs here, for nothing."""
        for number in STOP_SIGNALS * 2:
            with suppress(BaseException):
                signal.signal(number, self._remember)

    def _hold(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _unhold(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _let_go(self) -> None:
        """In a forked process: signals end it, as they would without Ratchet."""
        if self._taken:
            signal.set_wakeup_fd(-1)
        for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) == self._remember:
                signal.signal(number, default)
        self._unhold()

    def _remember(self, number: int, frame: Any) -> None:
        """Only a flag: the wake-up descriptor has told the side thread already, unless a script took it (asyncio does)."""
        self._signalled = True
        self._caught = self._caught or number == signal.SIGTERM
        if self._passes_on and number == signal.SIGINT:
            self._before[number](number, frame)
