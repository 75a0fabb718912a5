"""Compare two checkpoints bit for bit; for two jobs, find the first step at which their recorded fingerprints differ."""

from __future__ import annotations

import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from ratchet_contract.api.views import ComparisonView, DifferenceView
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.step_ring import PARTS, Part, StepFingerprint, read_ring
from ratchet_contract.errors import CheckpointError, Conflict
from ratchet_contract.paths import HomePaths
from ratchet_service.checkpoints import object_store
from ratchet_service.checkpoints.lineage import committed_in_lineage
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Checkpoint, Job
from ratchet_service.db.queries import find_checkpoint, find_job
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.isolation.file_access import as_owner
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.checkpoint_reader import CheckpointReader
from ratchet_store.read.compare import compare_opened, same_files
from ratchet_store.read.difference import advice, differences

_MAX_DIFFERENCES: Final = 50
_MAX_RANKS: Final = 64
_MAX_ATTEMPTS: Final = 100


class _Reader(CheckpointReader):
    """Reads a checkpoint with the rights of the directory's owner."""

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
    """A checkpoint's row, its job and its directory on the disk."""

    job: Job
    row: Checkpoint
    directory: Path


@dataclass(frozen=True)
class Comparer:
    """Compares checkpoints of jobs. ``permits``: limit on concurrent comparisons; it is low, since each reads whole
    checkpoints."""

    database: Database
    homes: HomePaths
    permits: ConcurrencyLimit

    def compare(
        self, job_id: str, other_id: str, checkpoint_id: str | None = None, other_checkpoint_id: str | None = None
    ) -> ComparisonView:
        """Compare checkpoints of two jobs. If two checkpoints are named, these are compared, whatever their steps. If only one is
        named, it is compared with the other job's checkpoint of the same step. If none is named, all steps of which both jobs
        have a checkpoint are compared in ascending order, up to the first difference. Return the last comparison. If it shows a
        difference, it includes the first step whose recorded fingerprints differ, if there is one. Raise ``NotFound``,
        ``Conflict``, ``CheckpointError`` or ``Refused``."""
        pairs = self._pairs(job_id, other_id, checkpoint_id, other_checkpoint_id)
        equal: int | None = None
        with self.permits.acquire():
            for a, b in pairs:
                found = self._compare_pair(a, b)
                if not found.identical or (a, b) == pairs[-1]:
                    break
                equal = a.row.step
            difference = None if found.identical else self._first_difference(job_id, other_id)
        step, part = difference or (None, None)
        return found.model_copy(update={"equal_through": equal, "first_step": step, "first_part": part})

    def _pairs(
        self, job_id: str, other_id: str, checkpoint_id: str | None, other_checkpoint_id: str | None
    ) -> list[tuple[_Stored, _Stored]]:
        """Return the pairs of checkpoints to compare, oldest step first, at least one. Raise ``NotFound`` or ``Conflict``."""
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
            has = "; ".join(f"{job.id} has {_steps_text(side)}" for job, side in zip(jobs, rows, strict=True))
            raise Conflict(
                f"the jobs have no checkpoint of the same step: {has}. Compare jobs that have a checkpoint of the same step",
                code="no-common-step",
            )
        return [(self._stored_checkpoint(jobs[0], a), self._stored_checkpoint(jobs[1], b)) for a, b in pairs]

    def _first_difference(self, *job_ids: str) -> tuple[int, Part] | None:
        """Return the first step whose recorded fingerprints differ between the two jobs, and the part of the fingerprint that
        differs. None: no difference is recorded. Only the first 64 ranks are compared."""
        with self.database.read() as session:
            jobs = [find_job(session, job_id) for job_id in job_ids]
            attempts = [
                list(
                    session.scalars(sa.select(Attempt.number).where(Attempt.job_id == job.id).order_by(Attempt.number))
                )
                for job in jobs
            ]
        ranks = min(_MAX_RANKS, *(job.spec["world"]["nodes"] * job.spec["world"]["ranks_per_node"] for job in jobs))
        found: list[tuple[int, Part]] = []
        for rank in range(ranks):
            a, b = (self._fingerprints(job.id, numbers, rank) for job, numbers in zip(jobs, attempts, strict=True))
            parts = ((step, a[step].first_difference(b[step])) for step in sorted(a.keys() & b.keys()))
            found += islice(((step, part) for step, part in parts if part is not None), 1)
        return min(found, key=lambda one: (one[0], PARTS.index(one[1])), default=None)

    def _fingerprints(self, job_id: str, attempts: list[int], rank: int) -> dict[int, StepFingerprint]:
        """Return step -> fingerprint of one rank, from the readable files of the last 100 of ``attempts`` (ascending). If several
        attempts did a step, the fingerprint of the newest one is returned."""
        out: dict[int, StepFingerprint] = {}
        for number in attempts[-_MAX_ATTEMPTS:]:
            ring = self.homes.job(job_id).attempt(number).ring(rank)
            with as_owner(ring), suppress(OSError):
                if stat.S_ISREG(ring.lstat().st_mode):  # the job's user may have replaced it
                    out |= read_ring(ring)
        return out

    def _stored_checkpoint(self, job: Job, row: Checkpoint) -> _Stored:
        """Return the checkpoint of ``row`` with its directory, which may not exist."""
        return _Stored(job, row, self.homes.job(job.id).checkpoint(row.step, row.attempt))

    def _compare_pair(self, a: _Stored, b: _Stored) -> ComparisonView:
        """Compare two checkpoints; tensors are read only if their files differ. Raise ``Conflict`` or ``CheckpointError``."""
        manifests = self._fetch_manifest(a), self._fetch_manifest(b)
        tensors = len({entry.name for manifest in manifests for entry in manifest.tensors})
        # equal digests: no data are read
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
                for d in found[:_MAX_DIFFERENCES]
            ],
            unsaved=unsaved[:_MAX_DIFFERENCES] if found else [],
            advice=advice(found, unsaved),
        )

    def _fetch_manifest(self, stored: _Stored) -> Manifest:
        """Return the manifest of a checkpoint, fetched first if necessary. Raise ``Conflict`` if it no longer exists, or
        ``CheckpointError``."""
        object_store.ensure_local(self.homes, stored.job, stored.row)
        try:
            with as_owner(stored.directory):
                return read_manifest(stored.directory)
        except CheckpointError as error:
            if error.code != "checkpoint-missing":
                raise
            raise Conflict(f"checkpoint {stored.row.name} is no longer on the disk", code="checkpoint-gone") from None


def _steps_text(rows: list[Checkpoint]) -> str:
    """Return a text with the ten newest steps of the checkpoints, like "steps 10, 20"; "none" if there are none."""
    steps = sorted({row.step for row in rows})
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[-10:]))}" if steps else "none"
