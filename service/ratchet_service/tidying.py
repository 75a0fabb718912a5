"""Checkpoints that no attempt will want: deleted by the service once the attempt that might write is proved dead.

A worker deletes only what its own attempt committed, so every attempt leaves up to ``keep_last`` behind; what goes beyond that
over all attempts goes here, and so do the remains of saves that a kill cut short.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.resume import Segment
from ratchet_service.ancestry import committed_of, within
from ratchet_service.models import Job
from ratchet_service.transitions import add_event
from ratchet_store.retain import retain, sweep


def tidy(session: Session, job: Job, paths: JobPaths, segments: list[Segment], epoch: int) -> None:
    """Keep the newest ``keep_last`` of the lineage; what is pinned, wished for by a resume, or the last verified one stays too.

    Runs inside the transaction that ends attempt ``epoch``, with the job's row locked. A crash in the middle leaves rows whose
    manifest is gone; the next run marks them. What cannot be deleted becomes an event: it costs space, nothing else.
    """
    committed = committed_of(session, job.id)
    protected = {(c.step, c.epoch) for c in committed if c.pinned}
    verified = [c for c in within(segments, committed) if c.verification == "ok"]
    protected |= {(c.step, c.epoch) for c in verified[:1]}
    if job.resume_from is not None:
        protected.add((job.resume_from["step"], job.resume_from["epoch"]))
    try:
        retain(
            paths.checkpoints,
            keep_last=job.spec["checkpoint"]["keep_last"],
            lineage=segments,
            protected=protected,
        )
        sweep(paths.checkpoints, dead_epochs=range(1, epoch + 1))
    except CheckpointError as error:
        add_event(session, job.id, "checkpoint-not-deleted", error.detail, epoch=epoch)
    for row in committed:
        if not (paths.checkpoint(row.step, row.epoch) / MANIFEST_NAME).exists():
            row.state = "deleted"
    session.flush()
