"""A script without a Session: it is started, stopped and started again, and told of as what it is.

Whether it gets on cannot be seen, so no deadline holds for it; what it saves and restores is its own affair. A stop goes to its
own handler of SIGTERM where it has one, and then has ``policy.stop_grace``; without one the process ends at once.
"""

from __future__ import annotations

import threading
from typing import Final

from ratchet_contract.messages import LaunchFile
from ratchet_contract.phases import Cause
from ratchet_contract.resume import Base, ResumeReport
from ratchet_contract.scripts import unapplied_hook
from ratchet_worker.counter import Stage, StepCounter
from ratchet_worker.listener import Listener
from ratchet_worker.reporter import Reporter

_FIRST_LINE: Final = (
    "a script without a Session of Ratchet: it is started from its first line, and what it saves and restores is its own affair "
    "(docs/adoption.md)"
)
_NO_DEADLINE: Final = "whether it gets on cannot be seen: a hang is not detected, and no deadline holds"


class Unmanaged:
    """One rank's script while it runs without a Session. ``told`` is the stop that its own handler was given, if any."""

    def __init__(
        self, launch: LaunchFile, rank: int, counter: StepCounter, reporter: Reporter, listener: Listener
    ) -> None:
        self._launch, self._rank = launch, rank
        self._counter, self._reporter, self._listener = counter, reporter, listener
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.active = False
        self.told: Cause | None = None

    def begin(self) -> None:
        """From here on there is nothing to watch; rank 0 reports it."""
        self.active = True
        self._counter.stage(Stage.UNMANAGED)
        if self._rank == 0:
            spec = self._launch.spec
            refusal = unapplied_hook(spec.script[0], spec.hook) if spec.script is not None else None
            # Of code that lies on the nodes, which nobody has looked at before.
            notes = [_FIRST_LINE, _NO_DEADLINE, *([refusal] if refusal is not None else [])]
            report = ResumeReport(
                verdict="unmanaged", base=Base(), world_size=self._launch.world_size, components=[], notes=notes
            )
            self._reporter.resumed(report)

    def become_managed(self) -> Cause | None:
        """A Session is made after all: its start-up begins, with a deadline of its own. Returns the stop that comes before it."""
        with self._lock:
            if self.told is None and self.active:
                self.active = False
                self._counter.stage(Stage.STARTUP)
            return self.told

    def hand_over(self, cause: Cause) -> bool:
        """On the side thread: give a stop to the script's own handler and wait until the script has ended, for as long as
        ``stop_grace``. False: it has none, or is still there."""
        with self._lock:
            if not self.active or not self._listener.script_handles_sigterm():
                return False
            self.told = cause
        self._listener.terminate_script()
        return self._ended.wait(self._launch.spec.policy.stop_grace)

    def over(self) -> None:
        """The script has ended, in whatever way: signals are Ratchet's again, and nobody waits for it any more."""
        self._listener.retake()
        self._ended.set()
