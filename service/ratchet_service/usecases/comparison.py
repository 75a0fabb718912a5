"""Two checkpoints against each other, bit for bit: of two jobs the first step at which they differ."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet_contract.api import ComparisonView, DifferenceView
from ratchet_contract.errors import CheckpointError, Conflict
from ratchet_contract.manifest import Manifest
from ratchet_contract.paths import HomePaths
from ratchet_service import object_store
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Checkpoint, Job
from ratchet_service.turns import Turns
from ratchet_service.usecases.queries import committed_in_lineage, find_checkpoint, find_job
from ratchet_store.checkpoint_difference import advice, differences
from ratchet_store.commit import read_manifest
from ratchet_store.compare import compare_opened, same_files
from ratchet_store.read import CheckpointReader

_MOST: Final = 50


class _Reader(CheckpointReader):
    """By the rights of the job's owner."""

    def __init__(self, directory: Path) -> None:
        with as_owner(directory):
            super().__init__(directory)

    def state(self, rank: int) -> Any:
        with as_owner(self.directory):
            return super().state(rank)

    def tensors(self, wanted: str | Collection[str] = "") -> Any:
        with as_owner(self.directory):
            return super().tensors(wanted)


@dataclass(frozen=True)
class _Stored:
    job: Job
    row: Checkpoint
    directory: Path


@dataclass(frozen=True)
class Comparer:
    """``turns``: of comparing at one time, since it reads whole checkpoints."""

    database: Database
    homes: HomePaths
    turns: Turns

    def compare(
        self, job_id: str, other_id: str, checkpoint_id: str | None = None, other_checkpoint_id: str | None = None
    ) -> ComparisonView:
        """Of the first step, among those that both have a checkpoint of, at which they differ, else of the newest; or of the two
        that are named (one alone: against the other job's of the same step). What the recorded digests say to be the same is not
        read. Raises ``NotFound``, ``Conflict`` (``no-common-step``, ``checkpoint-gone``), ``CheckpointError``, ``Refused``
        (``busy``)."""
        pairs = self._pairs(job_id, other_id, checkpoint_id, other_checkpoint_id)
        equal: int | None = None
        with self.turns.taken():
            for a, b in pairs:
                found = self._compared(a, b)
                if not found.identical or (a, b) == pairs[-1]:
                    break
                equal = a.row.step
        return found.model_copy(update={"equal_through": equal})

    def _pairs(
        self, job_id: str, other_id: str, checkpoint_id: str | None, other_checkpoint_id: str | None
    ) -> list[tuple[_Stored, _Stored]]:
        """By step, oldest first."""
        with self.database.read() as session:
            jobs = find_job(session, job_id), find_job(session, other_id)
            rows = []
            for job, named in zip(jobs, (checkpoint_id, other_checkpoint_id), strict=True):
                found = (
                    committed_in_lineage(session, job) if named is None else [find_checkpoint(session, job.id, named)]
                )
                rows.append([row for row in found if row.job_id == job.id])
        for row in (*rows[0], *rows[1]):
            if row.state != "committed":
                raise Conflict(f"checkpoint {row.name} is {row.state}: it cannot be compared", code="checkpoint-gone")
        if checkpoint_id is not None and other_checkpoint_id is not None:
            pairs = [(rows[0][0], rows[1][0])]
        else:
            steps = [{row.step: row for row in side} for side in rows]
            pairs = [(steps[0][step], steps[1][step]) for step in sorted(steps[0].keys() & steps[1].keys())]
        if not pairs:
            has = "; ".join(f"{job.id} has {_steps(side)}" for job, side in zip(jobs, rows, strict=True))
            raise Conflict(
                f"the jobs have no checkpoint of the same step: {has}. Compare jobs that were saved after the same step",
                code="no-common-step",
            )
        return [(self._stored(jobs[0], a), self._stored(jobs[1], b)) for a, b in pairs]

    def _stored(self, job: Job, row: Checkpoint) -> _Stored:
        return _Stored(job, row, self.homes.job(job.id).checkpoint(row.step, row.epoch))

    def _compared(self, a: _Stored, b: _Stored) -> ComparisonView:
        manifests = self._manifest(a), self._manifest(b)
        tensors = len({entry.name for manifest in manifests for entry in manifest.tensors})
        found = (
            [] if same_files(*manifests) else differences(compare_opened(_Reader(a.directory), _Reader(b.directory)))
        )
        return ComparisonView(
            job_id=a.job.id,
            checkpoint_id=a.row.name,
            with_job_id=b.job.id,
            with_checkpoint_id=b.row.name,
            identical=not found,
            step=a.row.step,
            tensors=tensors,
            different=len(found),
            differences=[
                DifferenceView(component=d.component, name=d.name, rank=d.rank, place=d.place, detail=d.detail)
                for d in found[:_MOST]
            ],
            advice=advice(found),
        )

    def _manifest(self, stored: _Stored) -> Manifest:
        object_store.provide(self.homes, stored.job, stored.row)
        try:
            with as_owner(stored.directory):
                return read_manifest(stored.directory)
        except CheckpointError as error:
            if error.code != "checkpoint-missing":
                raise
            raise Conflict(
                f"checkpoint {stored.row.name} is not on the disk any more", code="checkpoint-gone"
            ) from None


def _steps(rows: list[Checkpoint]) -> str:
    steps = sorted({row.step for row in rows})
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[-10:]))}" if steps else "none"
