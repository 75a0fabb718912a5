"""What all jobs together do, and what became of the attempts that have ended lately. The database counts along an index; figures
that need the row of each attempt are limited to the newest attempts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.fleet import FleetView, HostEndsView, OwnerUseView, ResumeKind, SlotHolderView, SlotsView
from ratchet_contract.api.views import GoodputView
from ratchet_contract.checkpoint.resume_report import Redone, is_proved
from ratchet_contract.phases import Cause
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint, Job
from ratchet_service.lifecycle.goodput import total_parts
from ratchet_service.lifecycle.redone_steps import redone_of
from ratchet_service.scheduling import queue_queries
from ratchet_service.scheduling.fair_order import Share
from ratchet_service.scheduling.node_faults import caused_ends, faults_of, planned_exclusions
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.usecases.goodput import SPAN_COLUMNS, Saves, goodput_view, save_times, span_of
from ratchet_service.usecases.usage import Hours, held_hours, share_columns

MAX_ATTEMPTS: Final = 5_000
"""Most ended attempts whose rows are read."""
MAX_HOSTS: Final = 50
_HOST_FAILURES: Final = [cause for cause in Cause if cause.is_failure or cause is Cause.NODE_LOST]


class _Figures(NamedTuple):
    """Figures of the newest attempts of the window. ``ended``: how many of these have ended; ``attempts``: how many there are."""

    goodput: GoodputView
    resumes: Mapping[ResumeKind, int]
    hours: Mapping[str, Hours]
    attempts: int
    ended: int


def fleet(session: Session, capacity: Capacity | None, days: int) -> FleetView:
    """Return the figures of all jobs, with a window of the last ``days`` days. ``capacity``: of this service's launcher
    ``local``; None: not known."""
    now = now_in(session)
    since = now - timedelta(days=days)
    phases = session.execute(sa.select(Job.phase, sa.func.count()).group_by(Job.phase))
    causes = sa.select(Attempt.cause, sa.func.count()).where(Attempt.ended_at >= since).group_by(Attempt.cause)
    ends = {cause or Cause.UNKNOWN: count for cause, count in session.execute(causes)}
    figures = _newest_attempts(session, since, now)
    return FleetView(
        since=since,
        jobs=dict(sorted((phase, count) for phase, count in phases)),
        slots=_slots(session, capacity),
        ends=ends,
        hosts=_hosts(session, since),
        owners=_owners(queue_queries.held_by_owner(session), figures.hours),
        goodput=figures.goodput,
        resumes=figures.resumes,
        attempts=figures.attempts,
        attempts_left_out=sum(ends.values()) - figures.ended,
    )


def _slots(session: Session, capacity: Capacity | None) -> list[SlotsView]:
    """Return the slots of this machine by kind, with the jobs that hold them."""
    grants = [
        (grant.job or "", {"cpu": grant.cpus, "gpu": grant.gpus}) for grant in queue_queries.active_grants(session)
    ]
    query = sa.select(Job.id, Job.name, Job.owner).where(Job.id.in_({job_id for job_id, _ in grants}))
    jobs = {job_id: (name, owner) for job_id, name, owner in session.execute(query)}
    sizes = {"cpu": None, "gpu": None} if capacity is None else {"cpu": capacity.cpus, "gpu": len(capacity.gpus)}
    return [
        SlotsView(
            kind=kind,
            capacity=sizes[kind],
            holders=[
                SlotHolderView(
                    job_id=job_id,
                    name=jobs[job_id][0],
                    owner=jobs[job_id][1],
                    count=len(held[kind]),
                    devices=list(held[kind]),
                )
                for job_id, held in sorted(grants, key=lambda grant: grant[0])
                if held[kind] and job_id in jobs
            ],
        )
        for kind in ("cpu", "gpu")
    ]


def _owners(held: Mapping[str, Share], hours: Mapping[str, Hours]) -> list[OwnerUseView]:
    """Return what each owner has now (``held``) and had in the window (``hours``), in order of owners."""
    return [
        OwnerUseView(
            owner=owner,
            running=(now := held.get(owner, Share())).jobs,
            ranks=now.ranks,
            gpus=now.gpus,
            gpu_hours=round((used := hours.get(owner, Hours())).gpu, 3),
            rank_hours=round(used.rank, 3),
        )
        for owner in sorted(held.keys() | hours.keys())
    ]


def _hosts(session: Session, since: datetime) -> list[HostEndsView]:
    """Return the ends since then of the ``MAX_HOSTS`` hosts with most failures, by cause, these hosts first."""
    on_node = (AttemptNode.job_id == Attempt.job_id) & (AttemptNode.attempt == Attempt.number)
    ended = sa.select(AttemptNode.host, Attempt.cause, sa.func.count().label("ends")).join(AttemptNode, on_node)
    ended = ended.where(Attempt.ended_at >= since, AttemptNode.host.is_not(None))
    counts = ended.group_by(AttemptNode.host, Attempt.cause).cte("counts").prefix_with("MATERIALIZED")
    failures = sa.func.sum(sa.case((counts.c.cause.in_(_HOST_FAILURES), counts.c.ends), else_=0)).label("failures")
    worst = sa.select(counts.c.host, failures).group_by(counts.c.host).order_by(failures.desc(), counts.c.host)
    hosts = worst.limit(MAX_HOSTS).subquery()
    query = sa.select(hosts.c.host, hosts.c.failures, counts.c.cause, counts.c.ends)
    out: dict[str, HostEndsView] = {}
    rows = query.join(counts, counts.c.host == hosts.c.host).order_by(hosts.c.failures.desc(), hosts.c.host)
    for host, number, cause, count in session.execute(rows):
        out.setdefault(host, HostEndsView(host=host, failures=number, ends={})).ends[cause or Cause.UNKNOWN] = count
    _add_faults(session, since, out)
    return list(out.values())


def _add_faults(session: Session, since: datetime, views: dict[str, HostEndsView]) -> None:
    """Add the faults of these hosts, among the newest ``MAX_ATTEMPTS`` ends that a known node caused, and the jobs that exclude
    them."""
    query = caused_ends(Attempt.ended_at >= since, AttemptNode.host.in_(views)).order_by(Attempt.ended_at.desc())
    for fault in faults_of(session, query.limit(MAX_ATTEMPTS)):
        counts = views[fault.host].faults
        counts[fault.kind] = counts.get(fault.kind, 0) + 1
    alive = sa.select(Attempt.job_id, Attempt.launch).where(Attempt.phase.in_(queue_queries.ALIVE_PHASES))
    for job_id, launch in session.execute(alive.order_by(Attempt.job_id)):
        for host in planned_exclusions(launch):
            if host in views:
                views[host].excluded_by.append(job_id)


def _newest_attempts(session: Session, since: datetime, now: datetime) -> _Figures:
    """Return the figures of the attempts that have not ended and of the newest ``MAX_ATTEMPTS`` that have ended since then."""
    columns = (Attempt.job_id, Attempt.number, Attempt.base_step, Attempt.last_step)
    ended = sa.select(*columns).where(Attempt.ended_at >= since).order_by(Attempt.ended_at.desc()).limit(MAX_ATTEMPTS)
    alive = sa.select(*columns).where(Attempt.phase.in_(queue_queries.ALIVE_PHASES))
    recent = sa.select(ended.subquery()).union_all(alive).cte("recent").prefix_with("MATERIALIZED")
    of = (Checkpoint.job_id == recent.c.job_id) & (Checkpoint.attempt == recent.c.number)
    # the steps, too, so that the key of a checkpoint is used
    saves = save_times(session, of & Checkpoint.step.between(recent.c.base_step, recent.c.last_step))
    this = (Attempt.job_id == recent.c.job_id) & (Attempt.number == recent.c.number)
    query = sa.select(Attempt.job_id, Attempt.number, Job.owner, *share_columns(), Attempt.redone, *SPAN_COLUMNS)
    spans, resumes = [], Counter[ResumeKind]()
    hours: dict[str, Hours] = defaultdict(Hours)
    done = 0
    for job_id, number, owner, ranks, device, world, device_now, redone, *row in session.execute(
        query.select_from(recent).join(Attempt, this).join(Job, Job.id == Attempt.job_id)
    ):
        span = span_of(row, saves.get((job_id, number), Saves()), now)
        spans.append(span)
        done += row[1] is not None
        if row[-1] in ("exact", "not-exact"):
            resumes[_resume_kind(row[-1], redone_of(redone))] += 1
        used = held_hours(span.begun, span.until, since, (ranks, device, world, device_now))
        if span.begun is not None:
            hours[owner] = hours[owner].plus(used._replace(rank=0.0) if used.gpu else used)
    parts = total_parts(spans, now, now, 0.0)
    share_known = parts._replace(unseen=0.0).goodput
    view = goodput_view(parts).model_copy(update={"goodput": None if share_known is None else round(share_known, 4)})
    return _Figures(view, resumes, hours, len(spans), done)


def _resume_kind(verdict: Literal["exact", "not-exact"], redone: Redone) -> ResumeKind:
    """Return how exact a resume was, by its report's verdict and by redone steps."""
    if redone.first_difference is not None:
        return "differs"
    if verdict == "not-exact":
        return "not-exact"
    return "exact-proved" if is_proved(verdict, redone) else "exact"
