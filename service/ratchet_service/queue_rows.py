"""What the rows say of the queue: who waits, what owners hold, and what stands in the way. Reads alone.

Of each owner the first ``LOOK`` jobs in order are looked at, so that one owner's many jobs hide nobody else's; they are found
by the index of phase, owner, priority and age, however many rows the table has. What cannot start takes no place among them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased

from ratchet_contract.phases import AttemptPhase, Cause, Desired, JobPhase
from ratchet_service.clock import now_in
from ratchet_service.decide import BEYOND
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.queue_order import Queued, Share
from ratchet_service.queue_preemption import Running
from ratchet_service.slots import Grant, Need
from ratchet_service.unmanaged import UNMANAGED

LOOK: Final = 100
"""Queued jobs of one owner that are looked at in one round, in order; of those that cannot start as many again."""
PAGE: Final = 10_000
"""Rows that are read at most in one statement, behind those that cannot start."""
UNMADE: Final = Cause.LAUNCHER_ERROR.value
"""Reason of a queued job whose attempt could not be made when its turn came. Until it can, it stands behind all others, and
nobody is stopped for it."""
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)
TOLD: Final = 2_000
"""Jobs that are told in one look why they wait, of those that were not looked at; the others in the next ones."""
_AT_ONCE: Final = 1_000
"""Ids in one statement."""
QUEUED: Final = sa.text("jobs.phase = 'QUEUED'")
"""In the words of ``ix_jobs_queued``, which is of queued jobs alone, so that it is used."""
ALIVE: Final = tuple(phase for phase in AttemptPhase if phase is not AttemptPhase.ENDED)


class Row(NamedTuple):
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
) -> list[Row]:
    """Jobs that may start now, of launchers ``kinds`` (None: of any): of each owner the first ``LOOK``, in no order.

    ``never``: why a job cannot start, however many others end. Of those the first ``LOOK`` that have not been told so come
    with them, and of those whose attempt could not be made as many: neither hides a job that can start. Nor does the place of
    one for which another was stopped: it comes from wherever its row stands."""
    out = {row.queued.job: row for row in claiming(session, now, kinds)}
    lines = Lines(session, now, kinds)
    for owner, priorities in owners(session).items():
        found: list[Row] = []
        untold: list[Row] = []
        unmade: list[Row] = []
        for row in lines.of(owner, priorities, LOOK):
            why = never(row.queued)
            if why is None:
                (unmade if row.reason == UNMADE else found).append(row)
            elif row.message != why:
                untold.append(row)
            if len(found) >= LOOK:
                break
        out.update((row.queued.job, row) for row in (*found, *untold[:LOOK], *unmade[:LOOK]))
    return list(out.values())


def these(session: Session, now: datetime, kinds: Collection[str] | None, ids: Sequence[str]) -> list[Row]:
    """Those of the jobs ``ids`` that may start now, of launchers ``kinds``; in no order."""
    query = _rows(now, kinds)
    portions = (ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE))
    return [_row(row) for portion in portions for row in session.execute(query.where(Job.id.in_(portion)))]


def claiming(session: Session, now: datetime, kinds: Collection[str] | None = None) -> list[Row]:
    """Those for which another job was stopped; in no order."""
    ids = session.scalars(sa.select(Job.id).where(Job.room_since.is_not(None))).all()
    return these(session, now, kinds, ids)


def unmade(session: Session, now: datetime) -> list[Row]:
    """Those whose attempt could not be made; in no order."""
    return these(session, now, None, session.scalars(sa.select(Job.id).where(QUEUED, Job.reason == UNMADE)).all())


def untold(session: Session, now: datetime, kinds: Collection[str], told: Collection[str]) -> list[str]:
    """Ids of jobs of launchers ``kinds`` that may start now and have none of the reasons ``told``: the first ``TOLD`` found."""
    reasons = session.scalars(sa.select(Job.reason).where(QUEUED).group_by(Job.reason)).all()
    out: list[str] = []
    for reason in (reason for reason in reasons if reason not in told):
        which = Job.reason.is_(None) if reason is None else Job.reason == reason
        query = sa.select(Job.id).where(QUEUED, which, due(now), launched_by(kinds))
        out += session.scalars(query.limit(TOLD - len(out)))
    return out


def tell(session: Session, ids: Sequence[str], kinds: Collection[str], *, reason: str, message: str) -> None:
    """Why jobs wait, those of ``ids`` that still do, of launchers ``kinds``; progress of a kind, so their versions stay."""
    still = due(now_in(session)) & launched_by(kinds) & (sa.func.coalesce(Job.reason, "") != UNMADE)
    for at in range(0, len(ids), _AT_ONCE):
        told = sa.update(Job).where(Job.id.in_(ids[at : at + _AT_ONCE]), still).values(reason=reason, message=message)
        session.execute(told.execution_options(synchronize_session=False))


def owners(session: Session) -> dict[str, list[tuple[int, int]]]:
    """Owners of queued jobs: their priorities, high ones first, and how many jobs of each are queued, back-offs or not."""
    counts = sa.select(Job.owner, Job.priority, sa.func.count()).where(Job.phase == JobPhase.QUEUED)
    out: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for owner, priority, count in session.execute(counts.group_by(Job.owner, Job.priority)):
        out[owner].append((priority, count))
    return {owner: sorted(priorities, reverse=True) for owner, priorities in out.items()}


class Lines:
    """Jobs that may start now, of launchers ``kinds`` (None: of any), owner by owner. Its statements are made once."""

    def __init__(self, session: Session, now: datetime, kinds: Collection[str] | None) -> None:
        self._session = session
        query = _rows(now, kinds).where(Job.owner == sa.bindparam("of"))
        query = query.order_by(Job.priority.desc(), Job.created_at, Job.id)
        low: sa.BindParameter[int] = sa.bindparam("low")
        high: sa.BindParameter[int] = sa.bindparam("high")
        at: sa.BindParameter[datetime] = sa.bindparam("at", type_=Job.created_at.type)
        behind = (Job.created_at >= at) & ((Job.created_at > at) | (Job.id > sa.bindparam("after")))
        self._one = query.where(Job.priority == low, behind).limit(sa.bindparam("many"))
        self._several = query.where(Job.priority.between(low, high))

    def of(self, owner: str, priorities: list[tuple[int, int]], first: int) -> Iterator[Row]:
        """By priority, then age, read as far as they are asked for: ``first`` rows, then more and more. ``priorities``: as
        ``owners`` tells them."""
        for low, high in _blocks(priorities, first):
            if low != high:  # about as many as are asked for
                yield from map(
                    _row, self._session.execute(self._several, {"of": owner, "low": low, "high": high}).all()
                )
                continue
            values, limit = {"of": owner, "low": low, "at": _LONG_AGO, "after": ""}, min(first, PAGE)
            while True:
                rows = self._session.execute(self._one, values | {"many": limit}).all()
                yield from map(_row, rows)
                if len(rows) < limit:
                    break
                values |= {"at": rows[-1].created_at, "after": rows[-1].id}
                limit = min(2 * limit, PAGE)


def _blocks(priorities: list[tuple[int, int]], look: int) -> Iterator[tuple[int, int]]:
    """Ranges of priorities, high ones first, with about ``look`` jobs in each: one query for many priorities with few jobs."""
    high, jobs = None, 0
    for i, (priority, count) in enumerate(priorities):
        high, jobs = priority if high is None else high, jobs + count
        last = i + 1 == len(priorities)
        if last or jobs + priorities[i + 1][1] > look:
            yield priority, high
            high, jobs = None, 0


def _rows(now: datetime, kinds: Collection[str] | None) -> sa.Select[Any]:
    """Of queued jobs that no back-off holds, what ``_row`` takes; ``kind`` only where ``kinds`` are asked for."""
    kind = sa.literal("") if kinds is None else launcher_kind()
    columns: list[Any] = [
        Job.id, Job.owner, Job.priority, Job.created_at, Job.room_since, Job.reason, Job.message, kind.label("kind"), *_taken()
    ]  # fmt: skip
    query = sa.select(*columns).where(due(now))
    return query if kinds is None else query.where(launched_by(kinds))


def _row(row: Any) -> Row:
    takes = _share_of(row.world, row.device)
    queued = Queued(row.id, row.owner, row.priority, row.created_at, takes, row.room_since)
    return Row(queued, row.kind, row.reason, row.message)


def _taken() -> tuple[sa.ColumnElement[str], sa.ColumnElement[str]]:
    """The world as JSON's text: one is like another, and read once."""
    return Job.spec["world"].as_string().label("world"), Job.resolved["device"].as_string().label("device")


def share(world: Any, device: str | None) -> Share:
    """What a job takes, by its spec's ``world``. One that cannot be read takes nothing: its turn tells what is wrong with it."""
    try:
        ranks = int(world["nodes"]) * int(world["ranks_per_node"])
    except (TypeError, KeyError, ValueError):
        return Share()
    return Share(gpus=ranks if device == "cuda" else 0, ranks=ranks, jobs=1)


@lru_cache(maxsize=4096)
def _share_of(world: str | None, device: str | None) -> Share:
    try:
        return share(json.loads(world or "null"), device)
    except ValueError:
        return Share()


def held(session: Session) -> dict[str, Share]:
    """By owner, of attempts that have not ended, on whichever launcher."""
    query = sa.select(Job.owner, *_taken()).join(Attempt, Attempt.job_id == Job.id).where(Attempt.phase.in_(ALIVE))
    out: dict[str, Share] = {}
    for name, world, device in session.execute(query):
        out[name] = out.get(name, Share()).plus(_share_of(world, device))
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
