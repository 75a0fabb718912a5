"""Leases: which reconciler manages which active job. The transaction that creates an attempt takes the job's lease. Each later
transaction in which a reconciler writes about the attempt first checks that the job's row still has the lease's token. Leases
expire by the database's clock."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from ratchet_contract.errors import NotFound, RatchetError
from ratchet_contract.phases import JobPhase
from ratchet_contract.processes.procfs import is_alive, start_time
from ratchet_service.db.clock import clock_of
from ratchet_service.db.models import Job
from ratchet_service.db.transitions import lock_job

ACTIVE = tuple(p for p in JobPhase if p.active)


class LeaseLost(RatchetError):
    """This process's lease on the job is lost; the caller drops the job."""

    code = "lease-lost"


MAX_LEASE: Final = timedelta(minutes=10)
"""Leases are assumed to be shorter than this: one that expires later was made by a wrong clock."""
SAFE_FRACTION: Final = 0.8
"""Fraction of a lease's length, counted by this process's monotonic clock from before the lease was taken or renewed, during
which the lease is surely still held. The rest allows for clocks of different speeds and for the time that the action takes."""


class Lease(NamedTuple):
    """A lease that this process took on a job and its attempt. ``token``: identifies this lease in the job's row."""

    job_id: str
    attempt: int
    token: str


class Free(NamedTuple):
    """A job that no reconciler managed when its row was read. ``acquire`` takes the job only if its attempt and lease are
    unchanged."""

    job_id: str
    attempt: int
    token: str | None
    expires_at: datetime | None


def new_owner() -> str:
    """Return an identifier of this process (host, pid, start time), by which later processes can detect that it has ended."""
    return f"{socket.gethostname()[:80]}/{os.getpid()}/{start_time(os.getpid())}"


def owner_is_dead(owner: str | None) -> bool:
    """True if the owner was a process of this host that no longer runs. False for other hosts."""
    parts = (owner or "").rsplit("/", 2)
    if len(parts) != 3 or parts[0] != socket.gethostname()[:80] or not (parts[1].isdigit() and parts[2].isdigit()):
        return False
    return not is_alive(int(parts[1]), int(parts[2]))


def is_expired(token: str | None, expires: datetime | None, now: datetime) -> bool:
    """True if there is no lease, or it counts as expired at ``now``, by the database's clock."""
    # one that ends later than MAX_LEASE was written before the clock was set back; a live owner renews it
    return token is None or expires is None or expires < now or expires > now + MAX_LEASE


def is_surely_held(held_at: float, now: float, seconds: float) -> bool:
    """True if a lease of ``seconds``, taken or renewed at ``held_at`` (monotonic), is certainly still held."""
    return now - held_at < SAFE_FRACTION * seconds


def has_lease(job: Job, lease: Lease) -> bool:
    """True if the job's row has this lease and the job is active."""
    return job.lease_token == lease.token and job.attempt == lease.attempt and job.phase.active


def database_now(session: Session) -> datetime:
    """Return the UTC time of the clock by which leases expire: the database server's, or with SQLite this machine's."""
    return clock_of(session).server_now(session)


def lease_values(session: Session, owner: str, seconds: float) -> dict[str, Any]:
    """Return the columns of a new lease: owner, a new token, and the expiry time ``seconds`` from now."""
    expires = database_now(session) + timedelta(seconds=seconds)
    return {"lease_owner": owner, "lease_token": secrets.token_hex(16), "lease_expires_at": expires}


NO_LEASE: dict[str, Any] = {"lease_owner": None, "lease_token": None, "lease_expires_at": None}


def free_jobs(session: Session, skip: Collection[str], condition: sa.ColumnElement[bool]) -> list[Free]:
    """Return the active jobs that no reconciler manages: without a lease, with an expired one, or with that of a process known to
    be dead. Nothing is locked. ``skip``: ids of jobs to leave out. ``condition``: SQL condition that the jobs must also meet."""
    now = database_now(session)
    query = sa.select(Job.id, Job.attempt, Job.lease_token, Job.lease_owner, Job.lease_expires_at)
    out = []
    for job_id, attempt, token, owner, expires in session.execute(query.where(Job.phase.in_(ACTIVE), condition)):
        if job_id not in skip and (is_expired(token, expires, now) or owner_is_dead(owner)):
            out.append(Free(job_id, attempt, token, expires))
    return out


def acquire(session: Session, free: Free, owner: str, seconds: float) -> Lease | None:
    """Take a new lease on a job of ``free_jobs``, and return it. None if the job is not free any more."""
    values = lease_values(session, owner, seconds)
    unchanged = Job.lease_token.is_not_distinct_from(free.token) & Job.lease_expires_at.is_not_distinct_from(
        free.expires_at
    )
    guard = sa.update(Job).where(Job.id == free.job_id, Job.phase.in_(ACTIVE), Job.attempt == free.attempt, unchanged)
    result = session.execute(guard.values(**values).execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    return Lease(free.job_id, free.attempt, values["lease_token"]) if result.rowcount == 1 else None


def renew(session: Session, leases: Iterable[Lease], seconds: float) -> set[str]:
    """Extend those of ``leases`` that this process still has to ``seconds`` from now. Return their jobs' ids."""
    expires = database_now(session) + timedelta(seconds=seconds)
    statement = sa.update(Job).where(_own_leases_filter(leases)).values(lease_expires_at=expires).returning(Job.id)
    return set(session.scalars(statement.execution_options(synchronize_session=False)))


def release(session: Session, leases: Iterable[Lease]) -> None:
    """Remove those of ``leases`` that this process still holds, so that the next reconciler need not wait for their expiry."""
    statement = sa.update(Job).where(_own_leases_filter(leases)).values(**NO_LEASE)
    session.execute(statement.execution_options(synchronize_session=False))


def _own_leases_filter(leases: Iterable[Lease]) -> sa.ColumnElement[bool]:
    """Return the SQL condition for rows that have one of these leases."""
    held = list(leases)
    # the tokens decide; the ids make the database use the primary key
    return Job.id.in_([lease.job_id for lease in held]) & Job.lease_token.in_([lease.token for lease in held])


def lock_leased_job(session: Session, lease: Lease) -> Job:
    """Lock the job's row, and return the job. Raises ``LeaseLost`` if it does not have this lease or is not active."""
    try:
        job = lock_job(session, lease.job_id)
    except NotFound:
        raise LeaseLost(f"job {lease.job_id}: it was ended by another reconciler, and deleted") from None
    if not has_lease(job, lease):
        raise LeaseLost(f"job {lease.job_id}, attempt {lease.attempt}: another reconciler has taken it over")
    return job
