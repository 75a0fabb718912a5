"""What must be true of every job, whatever died: checked against a job's history alone, and against the rows that it led to.

``check_history`` replays the events of one job by the transition table and the rules of epochs, commits and budgets; it needs
nothing but the events, so it judges what a real service has written as well as a simulation. ``check_database`` does that for
all jobs and compares the rows with what came out. Both return sentences; none is the sound of a sound job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.resume_report import Base, lineage_contains
from ratchet_contract.paths import parse_checkpoint_dir_name
from ratchet_contract.phases import AttemptPhase, Budget, Cause, Desired, Event, JobPhase, next_step
from ratchet_contract.protocol.lineage import lineage
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, AttemptNode, Job
from ratchet_service.db.models import Event as Row

_EVENT: Final = {event.value: event for event in Event}  # a look-up takes a fifth of a call of the class
_PHASE: Final = {phase.value: phase for phase in JobPhase}
_DESIRED: Final = {desired.value: desired for desired in Desired}
_MOVES: Final = frozenset(_EVENT)
_ENDS: Final = (Event.END_SUCCEEDED, Event.END_SUSPENDED, Event.END_CANCELLED, Event.END_REQUEUE, Event.END_FAILED)
_ENDS_AFTER: Final = {
    Desired.CANCEL: (Event.END_CANCELLED, Event.END_SUCCEEDED),
    Desired.SUSPEND: tuple(event for event in _ENDS if event is not Event.END_REQUEUE),
}
"""Ends of a job's attempt that follow these desired states."""
_TRAINING: Final = Event.TRAINING.value
_RESUME: Final = Event.RESUME.value
_OF_A_LIVE_ATTEMPT: Final = frozenset(
    {"rank-started", "resumed", "result", "checkpoint", "checkpoint-uploaded", "agent-stopped", "agent-killed"}
)
"""What only an attempt that has not ended, or its reconciler, may add to the history."""


class Happening(Protocol):
    """One event: a row of the table, or what the API shows of it."""

    @property
    def type(self) -> str: ...
    @property
    def attempt(self) -> int | None: ...
    @property
    def data(self) -> dict[str, Any]: ...


@dataclass
class Replay:
    """What a history leads to."""

    phase: JobPhase = JobPhase.QUEUED
    desired: Desired = Desired.RUN
    attempt: int = 0
    alive: bool = False  # an attempt was launched and has not ended
    preemptions: int = 0
    failures: int = 0
    bases: dict[int, Base] = field(default_factory=dict)
    committed: dict[tuple[int, int], int] = field(default_factory=dict)  # (step, attempt): place in the history
    unrecorded: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # attempt: its base, of which no event says so yet
    causes: dict[int, Cause] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def check_history(events: Iterable[Happening], *, forked: bool = False) -> Replay:
    """The events of one job from its submission on. ``forked``: its first base may be another job's checkpoint."""
    out = Replay()
    wish: tuple[int, int] | None = None
    for place, event in enumerate(events):

        def wrong(text: str, place: int = place, event: Happening = event) -> None:
            out.faults.append(f"event {place} ({event.type}, attempt {event.attempt}): {text}")

        if (
            event.type in _OF_A_LIVE_ATTEMPT
            and "from" not in event.data
            and (event.attempt != out.attempt or not out.alive)
        ):
            wrong(f"of an attempt that is over; the newest is {out.attempt}, {'alive' if out.alive else 'ended'}")
        if event.type in _MOVES and "from" in event.data:
            _check_transition(out, event, wrong)
        if event.type == _TRAINING and "base_step" in event.data:
            _check_base(out, event, forked, wish, wrong)
            wish = None
        elif event.type == _RESUME and "from_step" in event.data:
            wish = (int(event.data["from_step"]), 0)
        elif event.type in ("checkpoint", "checkpoint-adopted") and "checkpoint" in event.data:
            found = parse_checkpoint_dir_name(event.data["checkpoint"])
            if found is None or found[1] != event.attempt:
                wrong(f"{event.data['checkpoint']} is not of that attempt")
            else:
                out.committed.setdefault(found, place)
        elif event.type == "attempt-ended":
            _check_end(out, event, wrong)
    return out


def _check_transition(out: Replay, event: Happening, wrong: Any) -> None:
    """A change of phase: from where the job stood, as the table has it."""
    kind, before, after = _EVENT[event.type], _PHASE[event.data["from"]], _PHASE[event.data["to"]]
    if before is not out.phase:
        wrong(f"says it came from {before}, but the job was {out.phase}")
    step = next_step(before, kind, out.desired)
    if step.phase is not after:
        wrong(f"{before} -> {after}: the table says {step.phase}")
    told = _DESIRED[event.data["desired"]]
    if told is not (step.desired or out.desired):
        wrong(f"leaves the wish {told}; it was {out.desired}, and the table says {step.desired}")
    if kind is Event.LAUNCH:
        number = int(event.data["attempt"])
        if (
            number <= out.attempt
        ):  # one may be left out: the disk has seen it, in a time that the database has forgotten
            wrong(f"launches attempt {number} after {out.attempt}: a number is used again")
        if out.alive:
            wrong(f"launches attempt {number} while {out.attempt} has not ended")
        out.attempt, out.alive = number, True
    if kind in _ENDS and before.active:
        if out.alive or out.attempt not in out.causes:
            wrong(f"moves the job while attempt {out.attempt} has not ended")
        if event.attempt != out.attempt:
            wrong(f"is the end of attempt {event.attempt}, the newest is {out.attempt}")
        if kind not in _ENDS_AFTER.get(out.desired, _ENDS):
            wrong(f"the desired state was {out.desired}")
    if step.reset_budgets:
        out.preemptions = out.failures = 0
    out.phase, out.desired = after, told


def _check_base(out: Replay, event: Happening, forked: bool, wish: tuple[int, int] | None, wrong: Any) -> None:
    """An attempt's base: from scratch, the fork's, or a checkpoint of the job's own on its lineage. If its attempt was given up
    while it committed, the checkpoint is recorded when the attempt that found it on the disk ends."""
    if event.attempt != out.attempt or not out.alive:
        wrong(f"attempt {event.attempt} trains, the newest is {out.attempt}")
        return
    if out.attempt in out.bases:
        wrong("says twice what it began from")
    step, attempt = int(event.data["base_step"]), event.data["base_attempt"]
    base = Base(step=step, attempt=attempt)
    if attempt is not None and not (forked and (step, attempt) not in out.committed):
        segments = lineage(out.bases, resume_from=None)
        if (step, attempt) not in out.committed:
            out.unrecorded[out.attempt] = (step, attempt)
        if not lineage_contains(segments, step, attempt):
            wrong(f"begins from step {step} of attempt {attempt}, which no lineage holds: {segments}")
        if wish is not None and wish[0] != step:
            wrong(f"begins from step {step}, a resume asked for {wish[0]}")
    own = attempt is not None and (step, attempt) in (*out.committed, out.unrecorded.get(out.attempt))
    out.bases[out.attempt] = base if own else Base(step=step)


def _check_end(out: Replay, event: Happening, wrong: Any) -> None:
    number, cause = event.attempt or 0, Cause(event.data["cause"])
    if number != out.attempt or not out.alive:
        wrong(f"ends attempt {number}, the newest is {out.attempt}, {'alive' if out.alive else 'ended already'}")
    if number in out.causes:
        wrong(f"attempt {number} ends for the second time")
    base = out.unrecorded.get(number)
    if base is not None and base not in out.committed:
        wrong(f"began from step {base[0]} of attempt {base[1]}, which was never recorded as committed")
    out.causes[number], out.alive = cause, False
    if cause is Cause.COMPLETED:
        return  # the job has succeeded: nothing is counted any more
    start = out.bases[number].step if number in out.bases else 0
    if any(attempt == number and step > start for step, attempt in out.committed):
        out.failures = 0
    if cause.budget is Budget.PREEMPTIONS:
        out.preemptions += 1
    elif cause.budget in (Budget.FAILURES, Budget.FATAL):
        out.failures += 1


def check_database(database: Database, cpu_slots: int | None = None) -> list[str]:
    """All jobs' histories and the rows that they led to; ``cpu_slots``: how many there are to give."""
    with database.read() as session:
        jobs = list(session.scalars(sa.select(Job).order_by(Job.id)))
        out = [f"{job.id}: {fault}" for job in jobs for fault in check_job(session, job)]
        return out + check_slots(session, cpu_slots)


def check_job(session: Session, job: Job) -> list[str]:
    """One job: its history, and its rows against what that leads to."""
    events: Sequence[Row] = list(session.scalars(sa.select(Row).where(Row.job_id == job.id).order_by(Row.id)))
    attempts = list(session.scalars(sa.select(Attempt).where(Attempt.job_id == job.id).order_by(Attempt.number)))
    found = check_history(events, forked=job.forked_from is not None)
    faults = found.faults
    expected = {
        "phase": found.phase,
        "desired": found.desired,
        "attempt": found.attempt,
        "preemptions": found.preemptions,
        "failures": found.failures,
    }
    for name, value in expected.items():
        if getattr(job, name) != value:
            faults.append(f"{name} is {getattr(job, name)}, its history leads to {value}")
    if max((attempt.number for attempt in attempts), default=0) != job.attempt:
        faults.append(f"attempts {[attempt.number for attempt in attempts]}, the newest should be {job.attempt}")
    alive = [attempt.number for attempt in attempts if attempt.phase is not AttemptPhase.ENDED]
    if alive != ([job.attempt] if job.phase.active else []):
        faults.append(f"{job.phase}, and attempts {alive} have not ended")
    if not job.phase.active and job.lease_token is not None:
        faults.append(f"{job.phase}, and somebody still holds its lease")
    for attempt in attempts:
        cause = found.causes.get(attempt.number)
        if attempt.cause is not cause:
            faults.append(f"attempt {attempt.number} ended with {attempt.cause}, its history says {cause}")
    return faults


def check_slots(session: Session, cpu_slots: int | None = None) -> list[str]:
    """No CPU slot and no GPU is lent twice at one time, and none that is not there."""
    query = sa.select(AttemptNode).join(
        Attempt, (Attempt.job_id == AttemptNode.job_id) & (Attempt.number == AttemptNode.attempt)
    )
    faults: list[str] = []
    holders: dict[tuple[str, int], str] = {}
    for node in session.scalars(query.where(Attempt.phase != AttemptPhase.ENDED)):
        for kind, lent in (("CPU slot", node.cpu_slots), ("GPU", node.gpus)):
            for slot in lent:
                other = holders.setdefault((kind, slot), node.job_id)
                if other != node.job_id:
                    faults.append(f"{kind} {slot} is lent to {other} and {node.job_id}")
                if kind == "CPU slot" and cpu_slots is not None and not 0 <= slot < cpu_slots:
                    faults.append(f"CPU slot {slot} of {cpu_slots} is lent to {node.job_id}")
    return faults
