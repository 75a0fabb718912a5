"""What must hold at the end, for each job: read from its history, its rows, its disk, and the notes of who did which step."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import JobPhase
from ratchet_service.db.models import Attempt, Event, Job
from ratchet_store.read.compare import compare
from tests.support import invariants
from tests.support.chaos.clients import Submitted
from tests.support.chaos.run import Run
from tests.support.chaos.world import SLOTS

_SHOWN: Final = 5


class Verdict(NamedTuple):
    """``breaches`` by job id ("" for none in particular): sentences. ``identical``: final checkpoints that are their reference's,
    of those ``compared``, of which ``reals`` had real ranks; ``tensors``: how many were compared."""

    breaches: dict[str, list[str]]
    identical: int
    compared: int
    reals: int
    tensors: int
    ends: Counter[str]
    causes: Counter[str]  # of attempts' ends
    lost_steps: int
    parked: int  # attempts that have started in a parked agent


def check_run(run: Run) -> Verdict:
    """Nothing is going on any more."""
    breaches: dict[str, list[str]] = {"": list(run.breaches)}
    identical = compared = reals = tensors = lost = parked = 0
    ends, causes = Counter[str](), Counter[str]()
    with run.world.database.read() as session:
        breaches[""] += [f"slots: {text}" for text in invariants.check_slots(session, SLOTS)]
        breaches[""] += _check_idempotency(run, session)
        for job in run.jobs:
            if job.job_id is None:
                breaches[""].append(f"job {job.plan.number} was never submitted: {[str(one) for one in job.answers]}")
                continue
            row = session.get_one(Job, job.job_id)
            rows = list(session.scalars(sa.select(Attempt).where(Attempt.job_id == row.id).order_by(Attempt.number)))
            ends[row.phase.value] += 1
            causes.update(one.cause.value for one in rows if one.cause is not None)
            parked += sum(_started_parked(run.world.paths.job(row.id).attempt(one.number)) for one in rows)
            lost += sum(one.steps_lost or 0 for one in rows)
            found = (
                invariants.check_job(session, row)
                + _end(job, row)
                + _bases(rows)
                + _check_exclusive_steps(run, job, rows)
            )
            if row.phase is JobPhase.SUCCEEDED:
                found += _steps(job, rows)
                count, differences = _final(run, job, row)
                tensors, compared, identical = tensors + count, compared + 1, identical + (not differences)
                reals += job.plan.real
                found += differences
            if found:
                breaches[row.id] = [f"job {job.plan.number} ({job.plan.kind}) {row.id}: {text}" for text in found]
    return Verdict(
        {k: v for k, v in breaches.items() if v}, identical, compared, reals, tensors, ends, causes, lost, parked
    )


def _check_idempotency(run: Run, session: Session) -> list[str]:
    """Each key made one job, however many clients asked and however often."""
    wanted = len(run.jobs) + len(run.references)
    count = session.scalar(sa.select(sa.func.count()).select_from(Job)) or 0
    told = session.scalar(sa.select(sa.func.count()).select_from(Event).where(Event.type == "submitted")) or 0
    out = (
        []
        if (count, told) == (wanted, wanted)
        else [f"{wanted} submissions made {count} jobs, {told} events tell of one"]
    )
    for job in run.jobs:
        if len(job.ids) > 1:
            out.append(f"job {job.plan.number}: one key gave {sorted(job.ids)}")
    return out


def _started_parked(paths: AttemptPaths) -> bool:
    log = paths.node(0).agent_log
    return log.exists() and "start: parked" in log.read_text(errors="replace")


def _end(job: Submitted, row: Job) -> list[str]:
    right = (JobPhase.SUCCEEDED, JobPhase.CANCELLED) if job.plan.cancelled else (JobPhase.SUCCEEDED,)
    return [] if row.phase in right else [f"{row.phase} {row.reason}: {row.message}"]


def _bases(attempts: list[Attempt]) -> list[str]:
    """Every attempt began from the newest step that was committed before it."""
    out, safe = [], 0
    for one in attempts:
        if one.base_step is not None and one.base_step != safe:
            out.append(f"attempt {one.number} began from step {one.base_step}, {safe} was committed")
        safe = max(safe, one.committed_step or 0)
    return out


def _steps(job: Submitted, attempts: list[Attempt]) -> list[str]:
    executed = sum(one.last_step - (one.base_step or 0) for one in attempts if one.base_step is not None)
    lost = sum(one.steps_lost or 0 for one in attempts)
    if executed == job.plan.steps + lost:
        return []
    return [f"{executed} steps were made, {job.plan.steps} wanted and {lost} lost"]


def _check_exclusive_steps(run: Run, job: Submitted, attempts: list[Attempt]) -> list[str]:
    """No step of an attempt was done after a later attempt had done one: by the ranks' own notes, or what real ranks told."""
    if not job.plan.real:
        notes = run.world.notes / f"{job.job_id}.log"
        lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
        seen = 0
        for attempt, step, _ in lines:
            if int(attempt) < seen:
                return [f"attempt {attempt} did step {step} after attempt {seen} had begun to train: two at one time"]
            seen = int(attempt)
        return []
    paths = run.world.paths.job(job.job_id or "")
    spans = [span for one in attempts if (span := _activity_span(paths.attempt(one.number))) is not None]
    return [
        f"attempt {a[0]} still wrote {a[2]}, after attempt {b[0]} had begun {b[1]}"
        for a, b in itertools.pairwise(spans)
        if a[2] > b[1]
    ]


def _activity_span(paths: AttemptPaths) -> tuple[int, float, float] | None:
    """When the first rank's counter was made and a rank last wrote to its spool, by the file system's clock."""
    counter, spools = paths.counter(0), [path for path in (paths.spool(0), paths.spool(1)) if path.exists()]
    if not counter.exists() or not spools:
        return None
    launched = paths.launch_file.stat().st_mtime
    return int(paths.root.name), launched, max(path.stat().st_mtime for path in spools)


def _final(run: Run, job: Submitted, row: Job) -> tuple[int, list[str]]:
    """Tensors compared with the undisturbed job's, and what differs."""
    reference = run.references[job.plan.kind]
    folders = [_checkpoint(run, one) for one in (reference, row.id)]
    missing = [str(folder) for folder in folders if folder is None]
    if missing or folders[0] is None or folders[1] is None:
        return 0, ["no final checkpoint on the disk"]
    found = compare(folders[0], folders[1])
    if found.identical:
        return len(found.tensors), [] if found.tensors else ["nothing was compared"]
    names = [one.name for one in found.different] + [
        f"rank {one.rank}{one.pointer}: {one.a} != {one.b}" for one in found.states
    ]
    return len(found.tensors), [f"the final checkpoint differs in {len(names)} places: {', '.join(names[:_SHOWN])}"]


def _checkpoint(run: Run, job_id: str) -> Path | None:
    """The newest committed one on the lineage, as the job's row has it."""
    with run.world.database.read() as session:
        job = session.get_one(Job, job_id)
        if job.committed_attempt is None:
            return None
        folder = run.world.paths.job(job_id).checkpoint(job.committed_step, job.committed_attempt)
    return folder if (folder / "MANIFEST.json").is_file() else None


def history(run: Run, job_id: str) -> list[str]:
    """The job's events, one a line, and the end of its last agent's log."""
    with run.world.database.read() as session:
        events = list(session.scalars(sa.select(Event).where(Event.job_id == job_id).order_by(Event.id)))
    lines = [
        f"{event.at:%H:%M:%S.%f} {event.attempt or '-'} {event.type}: {event.message} {event.data}" for event in events
    ]
    logs = sorted(run.world.paths.job(job_id).root.glob("attempts/*/agent.log"))[-2:]
    return lines + [
        f"{path.parent.name}: {line}" for path in logs for line in path.read_text(errors="replace").splitlines()[-15:]
    ]
