"""A script without a Session: it is started, stopped and restarted, but saving and restoring are left to the script."""

from __future__ import annotations

import threading
from typing import Final

from ratchet_contract.checkpoint.resume_report import Base, ResumeReport
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.script.unmanaged_script import unapplied_hook_message
from ratchet_worker.coordination.reporter import Reporter
from ratchet_worker.coordination.stop_listener import Listener
from ratchet_worker.ipc.progress_counter import Stage, StepCounter

_FIRST_LINE: Final = (
    "a script without a Session of Ratchet: it is started from its first line, and must save and restore its own state "
    "(docs/adoption.md)"
)
_NO_DEADLINE: Final = "its progress is not visible: a hang is not detected, and no deadline applies"


class Unmanaged:
    """One rank's script while it runs without a Session. ``active``: whether it does so now. ``passed_stop``: the cause of a stop
    that was passed to the script's own SIGTERM handler; None if none was."""

    def __init__(
        self, launch: LaunchFile, rank: int, counter: StepCounter, reporter: Reporter, listener: Listener
    ) -> None:
        self._launch, self._rank = launch, rank
        self._counter, self._reporter, self._listener = counter, reporter, listener
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.active = False
        self.passed_stop: Cause | None = None

    def begin(self) -> None:
        """Mark the rank as unmanaged: its progress is not watched until ``become_managed``. Rank 0 reports this to the
        service."""
        self.active = True
        self._counter.enter_stage(Stage.UNMANAGED)
        if self._rank == 0:
            spec = self._launch.spec
            refusal = unapplied_hook_message(spec.script[0], spec.hook) if spec.script is not None else None
            # Needed for code that lies on the nodes, which nothing has checked before.
            notes = [_FIRST_LINE, _NO_DEADLINE, *([refusal] if refusal is not None else [])]
            report = ResumeReport(
                verdict="unmanaged", base=Base(), world_size=self._launch.world_size, components=[], notes=notes
            )
            self._reporter.report_resumed(report)

    def become_managed(self) -> Cause | None:
        """Record that the script makes a Session, unless it has received a stop. Returns the cause of that stop, or None."""
        with self._lock:
            if self.passed_stop is None and self.active:
                self.active = False
                self._counter.enter_stage(Stage.STARTUP)
            return self.passed_stop

    def pass_stop(self, cause: Cause) -> bool:
        """Pass a stop to the script's own SIGTERM handler, and wait up to ``policy.stop_grace`` for the script to end. Returns
        True if it has ended. Returns False at once if the script has no such handler, or is not ``active``."""
        with self._lock:
            if not self.active or not self._listener.script_handles_sigterm():
                return False
            self.passed_stop = cause
        self._listener.terminate_script()
        return self._ended.wait(self._launch.spec.policy.stop_grace)

    def on_script_end(self) -> None:
        """Record that the script has ended, normally or not: reinstall Ratchet's signal handlers, and release ``pass_stop``."""
        self._listener.reinstall_handlers()
        self._ended.set()
