"""Two checkpoints against each other, bit for bit: of two jobs the first step at which they differ."""

from __future__ import annotations

import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from ratchet_contract.api import ComparisonView, DifferenceView
from ratchet_contract.errors import CheckpointError, Conflict
from ratchet_contract.manifest import Manifest
from ratchet_contract.paths import HomePaths
from ratchet_contract.step_ring import PARTS, Part, StepFingerprint, read_ring
from ratchet_service import object_store
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Attempt, Checkpoint, Job
from ratchet_service.turns import Turns
from ratchet_service.usecases.queries import committed_in_lineage, find_checkpoint, find_job
from ratchet_store.checkpoint_difference import advice, differences
from ratchet_store.commit import read_manifest
from ratchet_store.compare import compare_opened, same_files
from ratchet_store.read import CheckpointReader

_MOST: Final = 50
_MOST_RANKS: Final = 64
_MOST_ATTEMPTS: Final = 100


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
            parted = None if found.identical else self._parted(job_id, other_id)
        step, part = parted or (None, None)
        return found.model_copy(update={"equal_through": equal, "first_step": step, "first_part": part})

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

    def _parted(self, *job_ids: str) -> tuple[int, Part] | None:
        """The first step at which fingerprints of both jobs' ranks differ, and in what."""
        with self.database.read() as session:
            jobs = [find_job(session, job_id) for job_id in job_ids]
            attempts = [
                list(
                    session.scalars(sa.select(Attempt.number).where(Attempt.job_id == job.id).order_by(Attempt.number))
                )
                for job in jobs
            ]
        ranks = min(_MOST_RANKS, *(job.spec["world"]["nodes"] * job.spec["world"]["ranks_per_node"] for job in jobs))
        found: list[tuple[int, Part]] = []
        for rank in range(ranks):
            a, b = (self._fingerprints(job.id, numbers, rank) for job, numbers in zip(jobs, attempts, strict=True))
            parts = ((step, a[step].difference(b[step])) for step in sorted(a.keys() & b.keys()))
            found += islice(((step, part) for step, part in parts if part is not None), 1)
        return min(found, key=lambda one: (one[0], PARTS.index(one[1])), default=None)

    def _fingerprints(self, job_id: str, attempts: list[int], rank: int) -> dict[int, StepFingerprint]:
        """By step; of one that was done again the last."""
        out: dict[int, StepFingerprint] = {}
        for number in attempts[-_MOST_ATTEMPTS:]:
            ring = self.homes.job(job_id).attempt(number).ring(rank)
            with as_owner(ring), suppress(OSError):
                if stat.S_ISREG(ring.lstat().st_mode):  # its user may have put something else in its place
                    out |= read_ring(ring)
        return out

    def _stored(self, job: Job, row: Checkpoint) -> _Stored:
        return _Stored(job, row, self.homes.job(job.id).checkpoint(row.step, row.epoch))

    def _compared(self, a: _Stored, b: _Stored) -> ComparisonView:
        manifests = self._manifest(a), self._manifest(b)
        tensors = len({entry.name for manifest in manifests for entry in manifest.tensors})
        compared = None if same_files(*manifests) else compare_opened(_Reader(a.directory), _Reader(b.directory))
        found, unsaved = ([], []) if compared is None else (differences(compared), compared.unsaved)
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
            unsaved=unsaved[:_MOST] if found else [],
            advice=advice(found, unsaved),
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
