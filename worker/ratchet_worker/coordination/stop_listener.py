"""Requests to a rank from outside: signals and ``control.json``. Does not import torch."""

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

from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.messages import Control
from ratchet_worker.ipc import stack_dump
from ratchet_worker.ipc.control_file import ControlReader
from ratchet_worker.ipc.group_abort import GroupAbort
from ratchet_worker.ipc.result_files import default_cause

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Listener:
    """Receives stop and save requests to one rank. Call ``install`` or ``install_signal_handlers`` on the main thread, and
    ``wait`` from one other thread."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signalled = False
        self.sigterm_received = False  # this process has received a SIGTERM
        self._sigterm_handled = False  # our handler, not one of the script, has handled a SIGTERM
        self._reader: ControlReader | None = None
        self._control = Control()
        self._masks = threading.local()  # the signal mask of each thread that forks
        self._installed = False  # our handlers are installed
        self._previous_handlers: dict[int, Any] = {}  # the previous handlers
        self._forwards_interrupt = False
        self.interrupt_count = 0  # SIGINTs so far
        self.abort = GroupAbort()

    def install(self) -> None:
        """Install handlers for stop signals, fatal errors, stack dumps and aborts. Call it before other threads start."""
        self.install_signal_handlers()
        faulthandler.enable()
        stack_dump.install_handlers()
        self.abort.start()

    def install_signal_handlers(self) -> Callable[[], None]:
        """Install handlers for SIGTERM and SIGINT. Returns a function that restores the previous handlers, except where other
        code has replaced the installed ones. Call both on the main thread."""
        # A Python handler runs between two bytecodes of the main thread, which may be inside a collective for minutes. The C
        # handler writes to this descriptor at once.
        wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous_handlers = {number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS}
        self._installed = True
        # A process that the script forks shares the wake-up descriptor: a pool that ends its workers by SIGTERM would stop the
        # job, and workers that only set a flag would never end. Signals are blocked until the child has reset its handlers.
        os.register_at_fork(
            before=self._block_signals, after_in_parent=self._unblock_signals, after_in_child=self._reset_in_child
        )

        def give_back() -> None:
            self._installed = False
            signal.set_wakeup_fd(wakeup)
            for number, handler in self._previous_handlers.items():
                if signal.getsignal(number) == self._handle_signal:
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

        return give_back

    def follow(self, control_file: Path, initial: Desired) -> None:
        """Let ``wait`` also read the desired state from ``control_file``. ``initial``: the desired state until the file is
        read."""
        self._reader = ControlReader(control_file)
        self._control = Control(desired=initial)

    def wait(self, seconds: float) -> tuple[Cause | None, int]:
        """Wait up to ``seconds`` for a signal. Returns what was requested so far: the cause of a stop, if any, and the number of
        "save now" requests."""
        readable, _, _ = select.select([self._read_fd], [], [], seconds)
        if readable:
            numbers = os.read(self._read_fd, 4096)
            self.interrupt_count += numbers.count(signal.SIGINT)
            self._signalled = self._signalled or any(n in numbers for n in STOP_SIGNALS)
            self.sigterm_received = self.sigterm_received or signal.SIGTERM in numbers
        if self._reader is not None:
            self._control = self._reader.poll() or self._control
        return self._cause(), self._control.checkpoint_request

    def _cause(self) -> Cause | None:
        """Return the cause of the requested stop, from the control file if it requests one; None without a stop."""
        if self._control.desired is not Desired.RUN:
            return self._control.cause or default_cause(self._control.desired)
        return Cause.SIGTERM if self._signalled else None

    def forward_interrupt(self) -> bool:
        """Send the main thread a SIGINT for the Python handler that was installed before this class's handler. Returns False, and
        sends nothing, if there was no such handler, or if a SIGINT was sent before."""
        if self._forwards_interrupt or not callable(self._previous_handlers.get(signal.SIGINT)):
            return False
        self._forwards_interrupt = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return True

    def script_handles_sigterm(self) -> bool:
        """True if the script has replaced the installed SIGTERM handler by a function of its own."""
        found = signal.getsignal(signal.SIGTERM)
        return callable(found) and found != self._handle_signal

    def terminate_script(self) -> None:
        """Send the main thread a SIGTERM for the script's own handler, unless that handler has received one from outside
        already."""
        if not self.sigterm_received or self._sigterm_handled:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def reinstall_handlers(self) -> None:
        """Reinstall this class's handlers after the script's end. If a signal for the script's own handler is pending, that
        handler runs here, and its exception is ignored."""
        for number in STOP_SIGNALS * 2:
            with suppress(BaseException):
                signal.signal(number, self._handle_signal)

    def _block_signals(self) -> None:
        """Before a fork: block the stop signals in the forking thread."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _unblock_signals(self) -> None:
        """After a fork: restore the signal mask from before it."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _reset_in_child(self) -> None:
        """In a forked process, restore the default handlers of SIGTERM and SIGINT, except those that the script has set."""
        if self._installed:
            signal.set_wakeup_fd(-1)
        for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) == self._handle_signal:
                signal.signal(number, default)
        self._unblock_signals()

    def _handle_signal(self, number: int, frame: Any) -> None:
        """Handle a stop signal by setting flags. After ``forward_interrupt``, a SIGINT also calls the previous handler."""
        # Also set here, since a script may have replaced the wake-up descriptor (asyncio does).
        self._signalled = True
        self._sigterm_handled = self._sigterm_handled or number == signal.SIGTERM
        if self._forwards_interrupt and number == signal.SIGINT:
            self._previous_handlers[number](number, frame)
