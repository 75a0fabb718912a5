"""The desired state of the ranks: the service's request and a signal to the agent, merged into one ``Control``."""

from __future__ import annotations

import threading
from typing import Final

from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.messages import Control
from ratchet_worker.ipc.result_files import default_cause

_STRENGTH: Final = {Desired.RUN: 0, Desired.PREEMPT: 1, Desired.SUSPEND: 2, Desired.CANCEL: 3}


class DesiredState:
    """Merges the service's requests and signals to the agent into one desired state. A stop by the service takes precedence over
    signals; only another stop replaces it. Thread-safe."""

    def __init__(self, initial: Desired = Desired.RUN) -> None:
        self._lock = threading.Lock()
        self._service_control = Control(
            desired=initial, cause=None if initial is Desired.RUN else default_cause(initial)
        )
        self._signal: Cause | None = None

    def update_from_service(self, control: Control) -> None:
        """Record the service's desired state: a stop replaces an earlier one, RUN does not. The highest ``checkpoint_request`` so
        far is kept."""
        with self._lock:
            checkpoints = max(control.checkpoint_request, self._service_control.checkpoint_request)
            if control.desired is Desired.RUN:
                control = self._service_control
            elif control.cause is None:
                control = control.model_copy(update={"cause": default_cause(control.desired)})
            self._service_control = control.model_copy(update={"checkpoint_request": checkpoints})

    def update_from_signal(self, cause: Cause) -> None:
        """Record a stop signal to the agent by its cause; only the first one counts."""
        with self._lock:
            self._signal = self._signal or cause

    def merged(self) -> Control:
        """Return the desired state for the ranks: the service's if that is a stop, else a preemption after a signal, else RUN."""
        with self._lock:
            local = Control(desired=Desired.PREEMPT, cause=self._signal) if self._signal else Control()
            if _STRENGTH[self._service_control.desired] >= _STRENGTH[local.desired]:
                return self._service_control
            return local.model_copy(update={"checkpoint_request": self._service_control.checkpoint_request})
