"""Quotas of owners, and the check of a quota when a job enters the queue. Two amounts are compared with the quota: what the job
takes alone, and how many of the owner's jobs have not ended. What attempts hold together is checked when they are launched
(``scheduler``)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.quotas import EVERYBODY
from ratchet_contract.errors import Conflict, FieldProblem, SpecError
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.db.models import Job, Quota
from ratchet_service.scheduling.fair_order import UNLIMITED, Limit
from ratchet_service.scheduling.queue_queries import job_share

EXCEEDED: Final = "quota-exceeded"
_LOCK_CLASS: Final = 0x52_41_54_51  # "RATQ", the first half of the key of PostgreSQL's advisory locks
_FIELDS: Final = {
    "gpus": ("GPUs", "/world/ranks_per_node"),
    "ranks": ("ranks", "/world/ranks_per_node"),
    "jobs": ("jobs", ""),
}
NOT_ENDED: Final = tuple(phase for phase in JobPhase if not phase.terminal)


def limits(session: Session) -> Callable[[str], Limit]:
    """Read all quotas, and return a function from an owner to its limits: its own, else those of ``EVERYBODY``."""
    rows = {q.owner: Limit(q.queued, q.jobs, q.ranks, q.gpus) for q in session.scalars(sa.select(Quota))}
    rest = rows.get(EVERYBODY, UNLIMITED)
    return lambda owner: rows.get(owner, rest)


def count_queued(session: Session, owner: str) -> int:
    """Return the number of the owner's jobs that have not ended."""
    query = sa.select(sa.func.count()).select_from(Job).where(Job.owner == owner, Job.phase.in_(NOT_ENDED))
    return session.scalar(query) or 0


def admit(
    session: Session, owner: str, spec: JobSpec, resolved: Resolved, *, pointer: str = "", is_new: bool = True
) -> None:
    """Check the owner's quota for a job that enters the queue. ``is_new`` False: the job is already counted and only its spec
    changes, so the number of jobs is not checked. ``pointer``: JSON pointer of the spec in the request body. May lock the owner
    until the transaction ends.

    Raise ``SpecError`` if the job alone exceeds the quota, ``Conflict`` if the owner has too many jobs.
    """
    limit = limits(session)(owner)
    takes = job_share({"nodes": spec.world.nodes, "ranks_per_node": spec.world.ranks_per_node}, resolved.device)
    never = limit.exceeded_resource(takes)
    if never is not None:
        name, wants, most = never
        what, field = _FIELDS[name]
        text = (
            f"the job takes {wants} {what}, the quota of {owner} is {most}: request fewer, or ask an admin for a larger "
            "quota"
        )
        problem = FieldProblem(pointer=pointer + field, code=EXCEEDED, detail=text)
        raise SpecError(f"{problem.pointer or '/'}: {text}", errors=[problem])
    if is_new:
        _check_queued(session, owner, limit)


def _check_queued(session: Session, owner: str, limit: Limit) -> None:
    """Raise ``Conflict`` if the owner already has ``limit.queued`` jobs that have not ended. May lock the owner."""
    if limit.queued is None:
        return
    lock_until_commit(session, owner)
    there = count_queued(session, owner)
    if there >= limit.queued:
        raise Conflict(
            f"jobs of {owner} that have not ended: {there}, and its quota (queued) is {limit.queued}: wait for one to end, "
            "cancel one, or ask an admin for more",
            code=EXCEEDED,
        )


def lock_until_commit(session: Session, name: str) -> None:
    """Hold a lock on ``name`` until the transaction ends; blocks while another transaction holds it. No effect on SQLite."""
    if session.get_bind().dialect.name != "sqlite":  # SQLite runs write transactions one after another
        key = int.from_bytes(zlib.crc32(name.encode()).to_bytes(4), signed=True)
        session.execute(
            sa.select(sa.func.pg_advisory_xact_lock(sa.cast(_LOCK_CLASS, sa.Integer), sa.cast(key, sa.Integer)))
        )
