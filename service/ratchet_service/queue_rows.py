"""What the rows say of the queue: who waits, what owners hold, and what stands in the way. Reads alone.

Of each owner the first ``LOOK`` jobs in order are looked at, so that one owner's many jobs hide nobody else's; they are found
by the index of phase, owner, priority and age, however many rows the table has. What cannot start takes no place among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased

from ratchet_contract.phases import AttemptPhase, Cause, Desired, JobPhase
from ratchet_service.clock import now_in
from ratchet_service.decide import BEYOND
from ratchet_service.ingest_effects import UNMANAGED
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.queue_order import Queued, Share
from ratchet_service.queue_preemption import Running
from ratchet_service.slots import Grant, Need

LOOK: Final = 100
"""Queued jobs of one owner that are looked at in one round, in order; of those that cannot start as many again."""
PAGE: Final = 10_000
"""Rows that are read at most in one statement, behind those that cannot start."""
UNMADE: Final = Cause.LAUNCHER_ERROR.value
"""Reason of a queued job whose attempt could not be made when its turn came. Until it can, it stands behind all others, and
nobody is stopped for it."""
ALIVE: Final = tuple(phase for phase in AttemptPhase if phase is not AttemptPhase.ENDED)


@dataclass(frozen=True)
class Row:
    """A queued job, with what its row says of why it waits."""

    queued: Queued
    kind: str
    reason: str | None
    message: str | None


def launcher_kind() -> sa.ColumnElement[str]:
    """Of a job's spec, for queries. A spec that cannot be read counts as ``local``: somebody must say so."""
    return sa.func.coalesce(Job.spec["launcher"]["kind"].as_string(), "local")


def launched_by(kinds: Collection[str]) -> sa.ColumnElement[bool]:
    """Jobs of these launchers: another reconciler has the others'."""
    return launcher_kind().in_(list(kinds))


def due(now: datetime) -> sa.ColumnElement[bool]:
    """Queued, and no back-off holds it (``decide.BEYOND``)."""
    over = sa.or_(Job.not_before.is_(None), Job.not_before <= now, Job.not_before > now + BEYOND)
    return (Job.phase == JobPhase.QUEUED) & over


def waiting(
    session: Session,
    now: datetime,
    kinds: Collection[str] | None = None,
    never: Callable[[Queued], str | None] = lambda _: None,
    look: int = LOOK,
) -> list[Row]:
    """Jobs that may start now, of launchers ``kinds`` (None: of any): of each owner the first ``look``, in no order.

    ``never``: why a job cannot start, however many others end. Of those the first ``look`` that have not been told so come
    with them, and of those whose attempt could not be made as many: neither hides a job that can start."""
    counts = sa.select(Job.owner, Job.priority, sa.func.count()).where(Job.phase == JobPhase.QUEUED)
    owners: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for owner, priority, count in session.execute(counts.group_by(Job.owner, Job.priority)):
        owners[owner].append((priority, count))
    out: list[Row] = []
    for owner, priorities in owners.items():
        found: list[Row] = []
        untold: list[Row] = []
        unmade: list[Row] = []
        blocks = _blocks(sorted(priorities, reverse=True), look)
        for row in (row for block in blocks for row in _of_owner(session, now, kinds, owner, *block, look)):
            why = never(row.queued)
            if why is None:
                (unmade if row.reason == UNMADE else found).append(row)
            elif row.message != why:
                untold.append(row)
            if len(found) >= look:
                break
        out += [*found, *untold[:look], *unmade[:look]]
    return out


def _blocks(priorities: list[tuple[int, int]], look: int) -> Iterator[tuple[int, int]]:
    """Ranges of priorities, high ones first, with about ``look`` jobs in each: one query for many priorities with few jobs."""
    high, jobs = None, 0
    for i, (priority, count) in enumerate(priorities):
        high, jobs = priority if high is None else high, jobs + count
        last = i + 1 == len(priorities)
        if last or jobs + priorities[i + 1][1] > look:
            yield priority, high
            high, jobs = None, 0


def _of_owner(
    session: Session, now: datetime, kinds: Collection[str] | None, owner: str, low: int, high: int, first: int
) -> Iterator[Row]:
    """In order, read as far as they are asked for: ``first`` rows, then more and more."""
    kind = launcher_kind()
    query = sa.select(
        Job.id, Job.priority, Job.created_at, Job.room_since, Job.reason, Job.message, kind.label("kind"), *_taken()
    ).where(Job.phase == JobPhase.QUEUED, Job.owner == owner, due(now))
    query = query.where(Job.priority == low) if low == high else query.where(Job.priority.between(low, high))
    if kinds is not None:
        query = query.where(launched_by(kinds))
    query, offset, limit = query.order_by(Job.priority.desc(), Job.created_at, Job.id), 0, min(first, PAGE)
    while True:
        rows = session.execute(query.offset(offset).limit(limit)).all()
        for row in rows:
            queued = Queued(row.id, owner, row.priority, row.created_at, share(row.world, row.device), row.room_since)
            yield Row(queued, row.kind, row.reason, row.message)
        if len(rows) < limit:
            return
        offset, limit = offset + limit, min(4 * limit, PAGE)


def _taken() -> tuple[sa.ColumnElement[Any], sa.ColumnElement[str]]:
    return Job.spec["world"].label("world"), Job.resolved["device"].as_string().label("device")


def share(world: Any, device: str | None) -> Share:
    """What a job takes, by its spec's ``world``. One that cannot be read takes nothing: its turn tells what is wrong with it."""
    try:
        ranks = int(world["nodes"]) * int(world["ranks_per_node"])
    except (TypeError, KeyError, ValueError):
        return Share()
    return Share(gpus=ranks if device == "cuda" else 0, ranks=ranks, jobs=1)


def held(session: Session) -> dict[str, Share]:
    """By owner, of attempts that have not ended, on whichever launcher."""
    query = sa.select(Job.owner, *_taken()).join(Attempt, Attempt.job_id == Job.id).where(Attempt.phase.in_(ALIVE))
    out: dict[str, Share] = {}
    for name, world, device in session.execute(query):
        out[name] = out.get(name, Share()).plus(share(world, device))
    return out


def grants(session: Session) -> list[Grant]:
    """Slots of attempts that have not ended; an agent that says of itself that it has may still be alive."""
    query = sa.select(AttemptNode.gpus, AttemptNode.cpu_slots, AttemptNode.job_id).join(
        Attempt, (Attempt.job_id == AttemptNode.job_id) & (Attempt.number == AttemptNode.attempt)
    )
    rows = session.execute(query.where(Attempt.phase.in_(ALIVE)))
    return [Grant(tuple(gpus), tuple(cpus), job_id) for gpus, cpus, job_id in rows if gpus or cpus]


def running(session: Session, min_run: float) -> list[Running]:
    """Attempts with slots, and which of them are spared: their spec says so, nobody saves their state (a script without a
    Session), the next preemption would end the job, or they were stopped for another job before and have not trained for
    ``min_run`` seconds since."""
    before = aliased(Attempt)
    query = (
        sa.select(
            Job.id, Job.owner, Job.priority, Job.desired, Job.preemptions, Job.step, Job.committed_step, Job.steps_per_second,
            Job.spec["policy"].label("policy"), Attempt.number, Attempt.phase, Attempt.results, Attempt.created_at,
            Attempt.training_at, Attempt.resume_report["verdict"].as_string().label("verdict"), AttemptNode.gpus,
            AttemptNode.cpu_slots, before.cause.label("cause_before"),
        )
        .join(Attempt, Attempt.job_id == Job.id)
        .join(AttemptNode, (AttemptNode.job_id == Job.id) & (AttemptNode.attempt == Attempt.number))
        .outerjoin(before, (before.job_id == Job.id) & (before.number == Attempt.number - 1))
        .where(Attempt.phase.in_(ALIVE), AttemptNode.node == 0)
    )  # fmt: skip
    now, pause = now_in(session), timedelta(seconds=min_run)
    out = []
    for row in session.execute(query):
        if not row.gpus and not row.cpu_slots:  # of an engine
            continue
        policy = row.policy if isinstance(row.policy, dict) else {}
        budget = policy.get("max_preemptions")
        again = row.cause_before is Cause.HIGHER_PRIORITY
        spared = (
            policy.get("preemptible") is False
            or row.verdict == UNMANAGED
            or (budget is not None and row.preemptions >= budget)
            or (again and (row.training_at is None or now - row.training_at < pause))
        )
        one = Running(
            row.id,
            row.number,
            row.owner,
            row.priority,
            Need(len(row.gpus), len(row.cpu_slots)),
            stopping=row.desired is not Desired.RUN or row.phase is AttemptPhase.STOPPING or bool(row.results),
            spared=spared,
            at_risk=max(0, row.step - row.committed_step) / (row.steps_per_second or 1.0),
            since=row.created_at,
        )
        out.append(one)
    return out
