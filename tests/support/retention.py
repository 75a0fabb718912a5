"""What the service does with a job's checkpoints at an attempt's end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import JobPaths, checkpoint_dir_name
from ratchet_contract.spec.checkpoint import BestSpec
from ratchet_service.checkpoints import cleanup, removal
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_store.retention.delete import complete_checkpoints, delete_unless_pinned
from ratchet_store.retention.rules import Id, Rules


def run_retention(
    checkpoints: Path,
    *,
    keep_last: int,
    lineage: Sequence[Segment],
    keep_every: int | None = None,
    keep_best: BestSpec | None = None,
    values: Mapping[Id, float] | None = None,
    pinned: Collection[Id] = (),
    protected: Collection[Id] = (),
    first: Collection[Id] = (),
) -> list[Id]:
    """As ``tidying`` and ``removal``, without a database. Returns the deleted ones, oldest first. Raises ``CheckpointError``
    where the system refuses one, after the others are gone."""
    found = complete_checkpoints(checkpoints, lineage)
    marked = {one for one, has in found.items() if has or one in pinned}
    surplus = Rules(keep_last, keep_every, keep_best).surplus(list(found), values or {}, marked, first)
    deleted, refused = list[Id](), list[CheckpointError]()
    for one in reversed(surplus):
        try:
            if one not in protected and delete_unless_pinned(checkpoints / checkpoint_dir_name(*one)):
                deleted.append(one)
        except CheckpointError as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return deleted


def run_retention_for_attempt(
    database: Database, job_id: str, paths: JobPaths, segments: list[Segment], attempt: int
) -> None:
    """As ``ending.settle``, of an attempt whose row stays as it is."""
    on_disk = cleanup.scan_disk(paths, segments, attempt)
    with database.write() as session:
        cleanup.mark_surplus(session, session.get_one(Job, job_id), paths, segments, on_disk, attempt)
    removal.delete_marked(database, paths, job_id)
