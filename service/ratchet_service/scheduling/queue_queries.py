"""Queries on the queue: which jobs wait, what owners hold and what stands in the way. The first jobs of each owner are
examined, so that one owner's many jobs hide no other owner's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased

from ratchet_contract.phases import AttemptPhase, Cause, Desired, JobPhase, Reason
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Attempt, AttemptNode, Job
from ratchet_service.lifecycle.decide import MAX_BACKOFF_AHEAD
from ratchet_service.lifecycle.unmanaged_script import UNMANAGED
from ratchet_service.scheduling.fair_order import Limit, Queued, Share
from ratchet_service.scheduling.preemption import Running
from ratchet_service.scheduling.scheduler import CREATION_FAILED, Row, no_slot_message
from ratchet_service.scheduling.slots import Capacity, Grant, Need, node_need, too_few_gpus

EXAMINED_PER_OWNER: Final = 100
"""Most queued jobs of one owner, in order, that one scheduling pass decides about; in addition, as many that can never
start, as many whose creation failed, and those for which another job was stopped."""
MAX_ROWS_PER_STATEMENT: Final = 10_000
"""Most rows of one priority that one statement reads."""
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)
MAX_REASONS_PER_PASS: Final = 2_000
"""Most jobs, of those that were not examined, for which one pass stores why they wait; later passes do the others."""
_MAX_IDS_PER_STATEMENT: Final = 1_000
"""Most ids in one statement."""
QUEUED: Final = sa.text("jobs.phase = 'QUEUED'")
"""The same text as the condition of the partial index ``ix_jobs_queued``, so that the index is used."""
ALIVE_PHASES: Final = tuple(phase for phase in AttemptPhase if phase is not AttemptPhase.ENDED)


def launcher_kind() -> sa.ColumnElement[str]:
    """Return the SQL expression for the launcher's name in a job's spec; ``local`` if it names none."""
    # so that one reconciler reports a spec that names no launcher
    return sa.func.coalesce(Job.spec["launcher"]["kind"].as_string(), "local")


def launched_by(kinds: Collection[str]) -> sa.ColumnElement[bool]:
    """Return the SQL condition that a job's launcher is one of ``kinds``."""
    return launcher_kind().in_(list(kinds))


def is_due(now: datetime) -> sa.ColumnElement[bool]:
    """Return the SQL condition that a job is queued and no back-off holds it at ``now``."""
    # a back-off that ends later than that was stored before the clock was set back
    over = sa.or_(Job.not_before.is_(None), Job.not_before <= now, Job.not_before > now + MAX_BACKOFF_AHEAD)
    return (Job.phase == JobPhase.QUEUED) & over


def startable_jobs(
    session: Session, now: datetime, slots: Mapping[str, bool], capacity: Capacity, limit: Callable[[str], Limit]
) -> list[Row]:
    """Return the queued jobs that a scheduling pass decides about, unordered. ``slots``, ``limit``: as in ``QueueState``."""
    out: list[Row] = []
    for has_slots in (True, False):  # so that neither kind of launcher hides jobs of the other
        kinds = [kind for kind, needs in slots.items() if needs is has_slots]
        if kinds:
            out += _first_jobs(session, now, kinds, capacity if has_slots else None, limit)
    return out


def _first_jobs(
    session: Session, now: datetime, kinds: Sequence[str], capacity: Capacity | None, limit: Callable[[str], Limit]
) -> Collection[Row]:
    """Return the first jobs of each owner, of launchers ``kinds``. ``capacity``: of this machine, if it runs them."""
    out = {row.queued.job: row for row in claiming_jobs(session, now, kinds)}
    lines = Lines(session, now, kinds)
    for owner, priorities in priorities_by_owner(session).items():
        found: list[Row] = []
        untold: list[Row] = []
        unmade: list[Row] = []
        for row in lines.for_owner(owner, priorities, EXAMINED_PER_OWNER):
            share = row.queued.share
            why = (capacity and too_few_gpus(share.gpus, capacity)) or limit(owner).never_fits_reason(share)
            if why is None:
                (unmade if row.reason == CREATION_FAILED else found).append(row)
            elif row.message != why:
                untold.append(row)
            if len(found) >= EXAMINED_PER_OWNER:
                break
        out.update(
            (row.queued.job, row) for row in (*found, *untold[:EXAMINED_PER_OWNER], *unmade[:EXAMINED_PER_OWNER])
        )
    return out.values()


def jobs_by_id(session: Session, now: datetime, kinds: Collection[str] | None, ids: Sequence[str]) -> list[Row]:
    """Return those of the jobs ``ids`` that are queued and in no back-off, of launchers ``kinds`` (None: any), unordered."""
    query = _select_rows(now, kinds)
    return [_parse_row(row) for portion in _portions(ids) for row in session.execute(query.where(Job.id.in_(portion)))]


def claiming_jobs(session: Session, now: datetime, kinds: Collection[str] | None = None) -> list[Row]:
    """Return the queued jobs, in no back-off, for which another job was stopped, of launchers ``kinds`` (None: any)."""
    ids = session.scalars(sa.select(Job.id).where(Job.preempting_since.is_not(None))).all()
    return jobs_by_id(session, now, kinds, ids)


def creation_failed_jobs(session: Session, now: datetime) -> list[Row]:
    """Return the queued jobs, in no back-off, with the reason ``CREATION_FAILED``, unordered."""
    return jobs_by_id(
        session, now, None, session.scalars(sa.select(Job.id).where(QUEUED, Job.reason == CREATION_FAILED)).all()
    )


def no_slot_jobs(
    session: Session, now: datetime, examined: Sequence[Row], passed_over: Sequence[Row], slots: Mapping[str, bool]
) -> list[str]:
    """Return the ids of the jobs that are to get the reason that no slot is left: those of ``passed_over`` that a quota held back
    before, and queued jobs in no back-off, of launchers with slots, that have none of the reasons of a scheduling pass. A job of
    ``examined`` is left out unless it was passed over. At most ``MAX_REASONS_PER_PASS`` besides ``passed_over``."""
    waiting = [row for row in passed_over if slots[row.kind]]
    decided = {row.queued.job for row in examined} - {row.queued.job for row in waiting}
    reasons = session.scalars(sa.select(Job.reason).where(QUEUED).group_by(Job.reason)).all()
    found: list[str] = []
    for reason in (reason for reason in reasons if reason not in (Reason.NO_SLOT, Reason.QUOTA, CREATION_FAILED)):
        which = Job.reason.is_(None) if reason is None else Job.reason == reason
        query = sa.select(Job.id).where(QUEUED, which, is_due(now), _launched_with_slots(slots))
        found += session.scalars(query.limit(MAX_REASONS_PER_PASS - len(found)))
    held_back_before = [row.queued.job for row in waiting if row.reason == Reason.QUOTA]
    return held_back_before + [job_id for job_id in found if job_id not in decided]


def store_no_slot(session: Session, ids: Sequence[str], slots: Mapping[str, bool], capacity: Capacity) -> None:
    """Store that no slot is left in the rows of those jobs ``ids`` that still wait, except after a failed creation and where
    another transaction holds the row. Their ETags do not change. ``slots``: as in ``QueueState``."""
    session.flush()
    made = sa.func.coalesce(Job.reason, "") != CREATION_FAILED
    still = is_due(now_in(session)) & _launched_with_slots(slots) & made
    for portion in _portions(ids):
        free = sa.select(Job.id).where(Job.id.in_(portion), still).with_for_update(skip_locked=True)
        update = sa.update(Job).where(Job.id.in_(free)).values(reason=Reason.NO_SLOT, message=no_slot_message(capacity))
        session.execute(update.execution_options(synchronize_session=False))


def _launched_with_slots(slots: Mapping[str, bool]) -> sa.ColumnElement[bool]:
    """Return the SQL condition that Ratchet manages the slots of a job's launcher. ``slots``: as in ``QueueState``."""
    return launched_by([kind for kind, has_slots in slots.items() if has_slots])


def stored_specs(session: Session, ids: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield job id, stored spec and stored decisions of the jobs ``ids``."""
    query = sa.select(Job.id, Job.spec, Job.resolved)
    for portion in _portions(ids):
        for row in session.execute(query.where(Job.id.in_(portion))):
            yield row.id, row.spec, row.resolved


def lock_versions(session: Session, ids: Sequence[str]) -> dict[str, int]:
    """Lock the rows of those jobs ``ids`` that are queued and whose rows no other transaction holds; return id -> version."""
    query = sa.select(Job.id, Job.version).where(Job.phase == JobPhase.QUEUED).with_for_update(skip_locked=True)
    found: dict[str, int] = {}
    for portion in _portions(ids):
        found |= {row.id: row.version for row in session.execute(query.where(Job.id.in_(portion)))}
    return found


def _portions(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield ``ids`` in portions for one statement each."""
    return (ids[at : at + _MAX_IDS_PER_STATEMENT] for at in range(0, len(ids), _MAX_IDS_PER_STATEMENT))


def priorities_by_owner(session: Session) -> dict[str, list[tuple[int, int]]]:
    """Return for each owner a list of (priority, number of its queued jobs of that priority), high priorities first."""
    counts = sa.select(Job.owner, Job.priority, sa.func.count()).where(Job.phase == JobPhase.QUEUED)
    out: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for owner, priority, count in session.execute(counts.group_by(Job.owner, Job.priority)):
        out[owner].append((priority, count))
    return {owner: sorted(priorities, reverse=True) for owner, priorities in out.items()}


class Lines:
    """Reads the jobs that may start now, of launchers ``kinds`` (None: any), one owner after another."""

    def __init__(self, session: Session, now: datetime, kinds: Collection[str] | None) -> None:
        self._session = session
        query = _select_rows(now, kinds).where(Job.owner == sa.bindparam("of"))
        query = query.order_by(Job.priority.desc(), Job.created_at, Job.id)
        low: sa.BindParameter[int] = sa.bindparam("low")
        high: sa.BindParameter[int] = sa.bindparam("high")
        at: sa.BindParameter[datetime] = sa.bindparam("at", type_=Job.created_at.type)
        behind = (Job.created_at >= at) & ((Job.created_at > at) | (Job.id > sa.bindparam("after")))
        self._one_priority_query = query.where(Job.priority == low, behind).limit(sa.bindparam("many"))
        self._priority_range_query = query.where(Job.priority.between(low, high))

    def for_owner(self, owner: str, priorities: list[tuple[int, int]], first: int) -> Iterator[Row]:
        """Yield the owner's jobs by priority (high ones first), then age (oldest first). ``first``: about how many are read at
        first. ``priorities``: as in ``priorities_by_owner``."""
        for low, high in _priority_blocks(priorities, first):
            if low != high:  # about as many jobs as requested
                yield from map(
                    _parse_row,
                    self._session.execute(self._priority_range_query, {"of": owner, "low": low, "high": high}).all(),
                )
                continue
            values, limit = {"of": owner, "low": low, "at": _LONG_AGO, "after": ""}, min(first, MAX_ROWS_PER_STATEMENT)
            while True:
                rows = self._session.execute(self._one_priority_query, values | {"many": limit}).all()
                yield from map(_parse_row, rows)
                if len(rows) < limit:
                    break
                values |= {"at": rows[-1].created_at, "after": rows[-1].id}
                limit = min(2 * limit, MAX_ROWS_PER_STATEMENT)


def _priority_blocks(priorities: list[tuple[int, int]], block_size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of priorities (lowest, highest), high ones first, each with at most ``block_size`` jobs or a single
    priority."""
    high, jobs = None, 0
    for i, (priority, count) in enumerate(priorities):
        high, jobs = priority if high is None else high, jobs + count
        last = i + 1 == len(priorities)
        if last or jobs + priorities[i + 1][1] > block_size:
            yield priority, high
            high, jobs = None, 0


def _select_rows(now: datetime, kinds: Collection[str] | None) -> sa.Select[Any]:
    """Return the query for the columns that ``_parse_row`` reads, of due jobs of launchers ``kinds``. None: of any launcher,
    without the columns that are parsed for a scheduling pass only."""
    columns: list[Any] = [
        Job.id, Job.owner, Job.priority, Job.created_at, Job.preempting_since, Job.reason, Job.message, Job.attempt,
        Job.version, Job.running_seconds, *share_columns(),
    ]  # fmt: skip
    if kinds is None:
        return sa.select(*columns).where(is_due(now))
    columns += [
        launcher_kind().label("kind"),
        Job.name,
        Job.resolved["threads_per_rank"].as_string().label("threads"),
        Job.spec["policy"]["timeout"].as_string().label("timeout"),
    ]
    return sa.select(*columns).where(is_due(now), launched_by(kinds))


def _parse_row(row: Any) -> Row:
    """Convert a row of the query ``_select_rows``."""
    takes = share_of(row.world, row.device)
    queued = Queued(row.id, row.owner, row.priority, row.created_at, takes, row.preempting_since)
    parsed = Row(queued, "", row.reason, row.message, row.attempt, row.version, running_seconds=row.running_seconds)
    if not hasattr(row, "kind"):
        return parsed
    need, timeout = _need_of(row.world, row.device, row.threads), _parse_number(row.timeout)
    return parsed._replace(kind=row.kind, need=need, timeout=timeout, name=row.name)


def share_columns() -> tuple[sa.ColumnElement[str], sa.ColumnElement[str]]:
    """Return two columns: the spec's ``world`` as JSON text (equal texts are parsed once), and the resolved device."""
    return Job.spec["world"].as_string().label("world"), Job.resolved["device"].as_string().label("device")


def job_share(world: Any, device: str | None) -> Share:
    """Return the GPUs, ranks and jobs (1) that a job takes; nothing if its ``world`` cannot be read."""
    try:
        ranks = int(world["nodes"]) * int(world["ranks_per_node"])
    # the job's launch reports what is wrong with it
    except (TypeError, KeyError, ValueError, OverflowError):
        return Share()
    return Share(gpus=ranks if device == "cuda" else 0, ranks=ranks, jobs=1)


@lru_cache(maxsize=4096)
def share_of(world: str | None, device: str | None) -> Share:
    """Like ``job_share``, for ``world`` as JSON text; cached. A text that is not JSON takes nothing."""
    try:
        return job_share(json.loads(world or "null"), device)
    except ValueError:
        return Share()


@lru_cache(maxsize=4096)
def _need_of(world: str | None, device: str | None, threads: str | None) -> Need:
    """Return what one node of a job needs; nothing if its row cannot be read."""
    try:
        need = node_need(int(json.loads(world or "null")["ranks_per_node"]), device, int(threads or ""))
        return need if need.cpus > 0 else Need(0, 0)
    # the job's launch reports what is wrong with it
    except (TypeError, KeyError, ValueError, OverflowError):
        return Need(0, 0)


def _parse_number(text: str | None) -> float | None:
    """Return a number of a stored spec; None if there is none, or if it cannot be read."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def held_by_owner(session: Session) -> dict[str, Share]:
    """Return for each owner what its attempts that have not ended hold, on any launcher."""
    query = (
        sa.select(Job.owner, *share_columns())
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Attempt.phase.in_(ALIVE_PHASES))
    )
    out: dict[str, Share] = {}
    for name, world, device in session.execute(query):
        out[name] = out.get(name, Share()).plus(share_of(world, device))
    return out


def active_grants(session: Session) -> list[Grant]:
    """Return the slots of every node of all attempts that have not ended, one ``Grant`` per node that holds any."""
    query = (
        sa.select(AttemptNode.gpus, AttemptNode.cpu_slots, Job.name, Job.id)
        .join(Attempt, (Attempt.job_id == AttemptNode.job_id) & (Attempt.number == AttemptNode.attempt))
        .join(Job, Job.id == Attempt.job_id)
        .where(Attempt.phase.in_(ALIVE_PHASES))
    )
    return [
        Grant(tuple(gpus), tuple(cpus), f"{name} ({job_id})", job_id)
        for gpus, cpus, name, job_id in session.execute(query)
        if gpus or cpus
    ]


def running_attempts(session: Session, min_run_seconds: float) -> list[Running]:
    """Return the attempts that hold slots and have not ended. ``min_run_seconds``: an attempt that follows a stop for a job of
    higher priority is protected until it has trained for this long."""
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
        .where(Attempt.phase.in_(ALIVE_PHASES), AttemptNode.node == 0)
    )  # fmt: skip
    now, pause = now_in(session), timedelta(seconds=min_run_seconds)
    out = []
    for row in session.execute(query):
        if not row.gpus and not row.cpu_slots:  # an engine runs it
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
            is_protected=spared,
            unsaved_seconds=max(0, row.step - row.committed_step) / (row.steps_per_second or 1.0),
            started_at=row.created_at,
        )
        out.append(one)
    return out
