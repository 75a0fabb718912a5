"""An attempt's use of ``checkpoint.uri``: fetches before the ranks start, uploads while they run and after their end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AGENT_RANK, LaunchFile
from ratchet_worker.agent import checkpoint_download
from ratchet_worker.agent.checkpoint_upload import AgentMessages, Uploader
from ratchet_worker.agent.report_sender import ReportSender

_MARGIN: Final = 5.0  # seconds of stop_grace, at most a tenth of it, that the agent reserves for its own end
_FAILURE_UPLOAD_SECONDS: Final = 10.0  # seconds for uploads after a failure; the next attempt uploads the rest


class ObjectStoreSync:
    """Downloads and uploads of node 0's agent. On other nodes, and for jobs without ``checkpoint.uri``, it does nothing."""

    def __init__(self, launch: LaunchFile, paths: AttemptPaths) -> None:
        self._launch, self._paths = launch, paths
        self._messages: AgentMessages | None = None
        if launch.node == 0 and launch.spec.checkpoint.uri is not None:
            self._messages = AgentMessages(paths)
            self._uploader = Uploader(launch, self._messages)

    def spools(self) -> dict[int, Path]:
        """Return the spool of the agent's own messages by the agent's rank number; empty if there is nothing to sync."""
        return {} if self._messages is None else {AGENT_RANK: self._paths.agent_spool}

    def fetch(self, report_sender: ReportSender, wait_for: checkpoint_download.WaitFor) -> float:
        """Start ``report_sender``, and fetch the newest checkpoint from the store if this disk lacks it; return the seconds that
        this took. Blocks. Raises ``NotStarted``."""
        if self._messages is None:
            return 0.0
        report_sender.start()  # a download may take long: the service must see reports meanwhile
        begin = time.monotonic()
        checkpoint_download.download_checkpoint(self._launch, self._paths, wait_for, self._messages)
        return time.monotonic() - begin

    def start(self) -> None:
        if self._messages is not None:
            self._uploader.start()

    def finish(self, cause: Cause, fenced: bool, remaining_grace: float) -> None:
        """Finish the uploads, or abandon them if the attempt is ``fenced``. Blocks for about ``remaining_grace`` seconds at most.
        If ``cause`` is a failure, it blocks for about 10 seconds at most, also if more remain."""
        if self._messages is None:
            return
        if fenced:
            self._uploader.abandon()
        else:
            seconds = max(0.0, remaining_grace - min(_MARGIN, remaining_grace / 10))
            if cause.is_failure:
                seconds = min(seconds, _FAILURE_UPLOAD_SECONDS)
            self._uploader.finish(seconds)
        self._messages.close()
