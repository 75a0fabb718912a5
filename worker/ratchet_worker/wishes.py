"""What is wanted of the ranks: the service's wish and a signal to the agent, merged into one ``Control``."""

from __future__ import annotations

import threading
from typing import Final

from ratchet_contract.messages import Control
from ratchet_contract.phases import Cause, Desired
from ratchet_worker.results import default_cause

_STRENGTH: Final = {Desired.RUN: 0, Desired.PREEMPT: 1, Desired.SUSPEND: 2, Desired.CANCEL: 3}


class Wishes:
    """cancel > suspend > preempt of the API > a signal, of which the first counts. Thread-safe.

    A stop, once wished, stays: ranks may have agreed on a step already. The API may still exchange one stop for another
    (a suspend that is resumed becomes a preempt), so its newest stop counts, not its strongest.
    """

    def __init__(self, first: Desired = Desired.RUN) -> None:
        self._lock = threading.Lock()
        self._api = Control(desired=first, cause=None if first is Desired.RUN else default_cause(first))
        self._signal: Cause | None = None

    def from_service(self, control: Control) -> None:
        with self._lock:
            checkpoints = max(control.checkpoint_request, self._api.checkpoint_request)
            if control.desired is Desired.RUN:
                control = self._api
            elif control.cause is None:
                control = control.model_copy(update={"cause": default_cause(control.desired)})
            self._api = control.model_copy(update={"checkpoint_request": checkpoints})

    def from_signal(self, cause: Cause) -> None:
        with self._lock:
            self._signal = self._signal or cause

    def merged(self) -> Control:
        with self._lock:
            local = Control(desired=Desired.PREEMPT, cause=self._signal) if self._signal else Control()
            if _STRENGTH[self._api.desired] >= _STRENGTH[local.desired]:
                return self._api
            return local.model_copy(update={"checkpoint_request": self._api.checkpoint_request})
