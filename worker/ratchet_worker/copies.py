"""``checkpoint.uri`` in the life of an attempt: fetched before the ranks start, copied while they run and at their end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from ratchet_contract.messages import AGENT_RANK, LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause, Outcome
from ratchet_worker import remote_base
from ratchet_worker.uplink import Uplink
from ratchet_worker.upload import Telling, Uploader

_MARGIN: Final = 5.0  # seconds of stop_grace, at most a tenth of it, that the agent keeps for its own end
_AFTER_FAILURE: Final = 10.0  # seconds; then the next attempt goes on with it


class Copies:
    """Of node 0's agent; a job without a uri, and every other node, has them too, and they do nothing."""

    def __init__(self, launch: LaunchFile, paths: AttemptPaths) -> None:
        self._launch, self._paths = launch, paths
        self._telling: Telling | None = None
        if launch.node == 0 and launch.spec.checkpoint.uri is not None:
            self._telling = Telling(paths)
            self._uploader = Uploader(launch, self._telling)

    def spools(self) -> dict[int, Path]:
        """What the agent itself has to say, for the uplink."""
        return {} if self._telling is None else {AGENT_RANK: self._paths.agent_spool}

    def fetch(self, uplink: Uplink, wait_for: remote_base.WaitFor) -> float:
        """What the disk has lost; returns the seconds that it took. Raises ``NotStarted``."""
        if self._telling is None:
            return 0.0
        uplink.start()  # it may take long, and the service is to hear that somebody is there
        begin = time.monotonic()
        remote_base.provide(self._launch, self._paths, wait_for, self._telling)
        return time.monotonic() - begin

    def start(self) -> None:
        if self._telling is not None:
            self._uploader.start()

    def finish(self, cause: Cause, fenced: bool, grace: float) -> None:
        """The ranks have ended. ``grace``: seconds of ``policy.stop_grace`` that are left."""
        if self._telling is None:
            return
        if fenced:
            self._uploader.abandon()
        else:
            seconds = max(0.0, grace - min(_MARGIN, grace / 10))
            if cause.outcome in (Outcome.FAILED, Outcome.LOST):
                seconds = min(seconds, _AFTER_FAILURE)
            self._uploader.finish(seconds)
        self._telling.close()
