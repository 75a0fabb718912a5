"""What a job's experiment trackers will get, stored as it is reported: before any series is thinned. ``trackers`` sends it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_hooks.summary import HookSummary
from ratchet_service.db.models import Job, TrackerOutbox, TrackerRun

_INSERT: Final = sa.insert(TrackerOutbox.__table__)  # type: ignore[arg-type]


class TrackerRows:
    """Values of one attempt, collected by ``add`` and written by ``store``. The caller has locked the job's row. Without
    ``trackers`` nothing is collected."""

    def __init__(self, session: Session, job: Job, attempt: int, trackers: Sequence[str]) -> None:
        self._session, self._job, self._attempt, self._trackers = session, job, attempt, trackers
        self._rows: list[tuple[int, datetime, Mapping[str, float]]] = []

    def begin(self) -> None:
        """Add a run to each tracker that has none of this job; the others continue, even if the job had ended."""
        if not self._trackers:
            return
        of_job = TrackerRun.job_id == self._job.id
        known = set(self._session.scalars(sa.select(TrackerRun.sink).where(of_job)))
        self._session.execute(sa.update(TrackerRun).where(of_job, TrackerRun.last_attempt.is_(None)).values(done=False))
        live = self._job.spec["tracking"]["publish"] == "live"
        fresh = [sink for sink in self._trackers if sink not in known]
        self._session.add_all(TrackerRun(job_id=self._job.id, sink=sink, number=1, live=live) for sink in fresh)

    def add(self, step: int, at: datetime, values: Mapping[str, float]) -> None:
        """Collect the values of one message in memory."""
        if self._trackers:
            self._rows.append((step, at, values))

    def add_hook(self, at: datetime, summary: HookSummary) -> None:
        """Collect the figures of a hook that has any."""
        figures = {
            "ratchet/hook/compression_rate": summary.compression_rate,
            "ratchet/hook/residual_norm": summary.residual_norm,
        }
        values = {name: value for name, value in figures.items() if value is not None}
        if values:
            self.add(summary.step, at, values)

    def store(self, refused: Collection[str]) -> None:
        """Write the collected values, but not those of the series in ``refused``, which the service does not keep either."""
        if not self._rows:
            return
        rows: list[dict[str, Any]] = []
        for step, at, found in self._rows:
            values = {name: value for name, value in found.items() if name not in refused} if refused else found
            rows.append(
                {"job_id": self._job.id, "attempt": self._attempt, "step": step, "at": at, "points": json.dumps(values)}
            )
        self._session.connection().execute(_INSERT, rows)
        self._rows = []
