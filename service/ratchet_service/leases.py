"""Leases: which reconciler looks after which active job. Taken, renewed and given back by guarded UPDATEs.

A lease has a token of its own, new each time it is taken. Whatever a reconciler writes about a job, it writes in a
transaction that holds the job's row and has seen its own token there (``hold``): a reconciler that was stopped past the end
of its lease finds another token and drops the job. Expiry goes by the database's clock.
"""

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
from ratchet_contract.process_start import start_time
from ratchet_service.clock import clock_of
from ratchet_service.launchers.processes import is_alive
from ratchet_service.models import Job
from ratchet_service.transitions import lock_job

ACTIVE = tuple(p for p in JobPhase if p.active)


class LeaseLost(RatchetError):
    """Another reconciler looks after the job now."""

    code = "lease-lost"


LONGEST: Final = timedelta(minutes=10)
"""No lease is given for so long."""
TRUSTED: Final = 0.8
"""Of a lease's length, counted by this process's monotonic clock from before the lease was taken or renewed: for so long it is
surely still held, the clocks' different speeds and the deed's own time allowed for."""


class Lease(NamedTuple):
    job_id: str
    epoch: int
    token: str


class Free(NamedTuple):
    """A job that nobody looks after, and the lease that stood there when it was seen."""

    job_id: str
    epoch: int
    token: str | None
    expires_at: datetime | None


def new_owner() -> str:
    """Names this process for good: host, pid, start time. A later process can tell that it is dead."""
    return f"{socket.gethostname()[:80]}/{os.getpid()}/{start_time(os.getpid())}"


def owner_is_dead(owner: str | None) -> bool:
    """Known to be dead: a process of this host that is not there any more. Of other hosts nothing is known."""
    parts = (owner or "").rsplit("/", 2)
    if len(parts) != 3 or parts[0] != socket.gethostname()[:80] or not (parts[1].isdigit() and parts[2].isdigit()):
        return False
    return not is_alive(int(parts[1]), int(parts[2]))


def expired(token: str | None, expires: datetime | None, now: datetime) -> bool:
    """Nobody holds that lease, or nobody any more. ``now``: by the database's clock. One that ends later than any lease can was
    written before that clock was set back: who is alive renews it, and of who is dead nobody waits for the end."""
    return token is None or expires is None or expires < now or expires > now + LONGEST


def surely_held(held_at: float, now: float, seconds: float) -> bool:
    """A lease of ``seconds`` taken or renewed not before ``held_at``, both by this process's monotonic clock: see ``TRUSTED``."""
    return now - held_at < TRUSTED * seconds


def is_ours(job: Job, lease: Lease) -> bool:
    """What the job's row must say to whoever writes about it."""
    return job.lease_token == lease.token and job.epoch == lease.epoch and job.phase.active


def database_now(session: Session) -> datetime:
    """The clock by which leases expire."""
    return clock_of(session).of_server(session)


def lease_values(session: Session, owner: str, seconds: float) -> dict[str, Any]:
    """The columns of a new lease."""
    expires = database_now(session) + timedelta(seconds=seconds)
    return {"lease_owner": owner, "lease_token": secrets.token_hex(16), "lease_expires_at": expires}


NO_LEASE: dict[str, Any] = {"lease_owner": None, "lease_token": None, "lease_expires_at": None}


def free_jobs(session: Session, skip: Collection[str], which: sa.ColumnElement[bool]) -> list[Free]:
    """Active jobs that nobody looks after: lease missing, expired, or of an owner that is dead. ``which``: a condition of the
    caller's."""
    now = database_now(session)
    query = sa.select(Job.id, Job.epoch, Job.lease_token, Job.lease_owner, Job.lease_expires_at)
    out = []
    for job_id, epoch, token, owner, expires in session.execute(query.where(Job.phase.in_(ACTIVE), which)):
        if job_id not in skip and (expired(token, expires, now) or owner_is_dead(owner)):
            out.append(Free(job_id, epoch, token, expires))
    return out


def take(session: Session, free: Free, owner: str, seconds: float) -> Lease | None:
    """Take a job that ``free_jobs`` found; None when somebody else was faster: another has taken it, or its owner, back from
    where it was held up, has renewed its lease (which keeps the token) and trusts in it."""
    values = lease_values(session, owner, seconds)
    standing = Job.lease_token.is_not_distinct_from(free.token) & Job.lease_expires_at.is_not_distinct_from(
        free.expires_at
    )
    guard = sa.update(Job).where(Job.id == free.job_id, Job.phase.in_(ACTIVE), Job.epoch == free.epoch, standing)
    result = session.execute(guard.values(**values).execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    return Lease(free.job_id, free.epoch, values["lease_token"]) if result.rowcount == 1 else None


def renew(session: Session, leases: Iterable[Lease], seconds: float) -> set[str]:
    """Push the end of our own leases back; the ids of the jobs whose lease still was ours."""
    expires = database_now(session) + timedelta(seconds=seconds)
    statement = sa.update(Job).where(_ours(leases)).values(lease_expires_at=expires).returning(Job.id)
    return set(session.scalars(statement.execution_options(synchronize_session=False)))


def release(session: Session, leases: Iterable[Lease]) -> None:
    """Give leases back at a clean end, so that the next reconciler need not wait."""
    statement = sa.update(Job).where(_ours(leases)).values(**NO_LEASE)
    session.execute(statement.execution_options(synchronize_session=False))


def _ours(leases: Iterable[Lease]) -> sa.ColumnElement[bool]:
    """By key, so that the table is not read through; the token decides."""
    held = list(leases)
    return Job.id.in_([lease.job_id for lease in held]) & Job.lease_token.in_([lease.token for lease in held])


def held(session: Session, leases: Iterable[Lease]) -> set[Lease]:
    """Those that are still ours, their jobs' rows held until the transaction ends."""
    asked = list(leases)
    mine = _ours(asked) & Job.phase.in_(ACTIVE)
    query = sa.select(Job.id, Job.epoch, Job.lease_token).where(mine).order_by(Job.id).with_for_update()
    return set(asked) & {Lease(job_id, epoch, token or "") for job_id, epoch, token in session.execute(query)}


def hold(session: Session, lease: Lease) -> Job:
    """The job's row, held until the transaction ends, with our token seen on it. Raises ``LeaseLost``."""
    try:
        job = lock_job(session, lease.job_id)
    except NotFound:
        raise LeaseLost(f"job {lease.job_id}: it was ended by another reconciler, and deleted") from None
    if not is_ours(job, lease):
        raise LeaseLost(f"job {lease.job_id}, attempt {lease.epoch}: another reconciler has taken it over")
    return job
