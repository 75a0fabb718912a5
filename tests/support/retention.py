"""What the service does with a job's checkpoints at an attempt's end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import JobPaths, checkpoint_dir_name
from ratchet_contract.resume import Segment
from ratchet_contract.spec_checkpoint import BestSpec
from ratchet_service import removal, tidying
from ratchet_service.database import Database
from ratchet_service.models import Job
from ratchet_store.keeping import Id, Rules
from ratchet_store.retain import delete_unless_pinned, whole


def retain(
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
    found = whole(checkpoints, lineage)
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


def tidy(database: Database, job_id: str, paths: JobPaths, segments: list[Segment], epoch: int) -> None:
    """As ``ending.settle``, of an attempt whose row stays as it is."""
    on_disk = tidying.look(paths, segments, epoch)
    with database.write() as session:
        tidying.mark(session, session.get_one(Job, job_id), paths, segments, on_disk, epoch)
    removal.carry_out(database, paths, job_id)
