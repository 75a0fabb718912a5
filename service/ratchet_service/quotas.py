"""What an owner may have in the queue and hold at one time: the limits, and the door of the queue.

``queued`` counts jobs that have not ended; it is looked at where a job comes in (submission, fork, resume after an end), in the
transaction that lets it in and with the owner's door held, so that of two at the same moment one sees the other. What attempts
hold (``jobs``, ``ranks``, ``gpus``) is looked at where they are launched (``queueing``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api_quotas import EVERYBODY
from ratchet_contract.errors import Conflict, FieldProblem, SpecError
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_service.models import Job, Quota
from ratchet_service.queue_order import UNLIMITED, Limit
from ratchet_service.queue_rows import share

EXCEEDED: Final = "quota-exceeded"
_DOOR: Final = 0x52_41_54_51  # "RATQ", the first half of the key of PostgreSQL's advisory locks
_FIELDS: Final = {
    "gpus": ("GPUs", "/world/ranks_per_node"),
    "ranks": ("ranks", "/world/ranks_per_node"),
    "jobs": ("jobs", ""),
}
NOT_ENDED: Final = tuple(phase for phase in JobPhase if not phase.terminal)


def limits(session: Session) -> Callable[[str], Limit]:
    """The limits of every owner, as they are now."""
    rows = {q.owner: Limit(q.queued, q.jobs, q.ranks, q.gpus) for q in session.scalars(sa.select(Quota))}
    rest = rows.get(EVERYBODY, UNLIMITED)
    return lambda owner: rows.get(owner, rest)


def queued(session: Session, owner: str) -> int:
    """Jobs of the owner that have not ended."""
    query = sa.select(sa.func.count()).select_from(Job).where(Job.owner == owner, Job.phase.in_(NOT_ENDED))
    return session.scalar(query) or 0


def admit(
    session: Session, owner: str, spec: JobSpec, resolved: Resolved, *, pointer: str = "", more: bool = True
) -> None:
    """One more job of ``owner``, or another spec of one that is counted already (``more`` False). ``pointer``: where the spec
    lies in the body.

    Raises ``Conflict`` (``quota-exceeded``) where the owner has as many as it may, ``SpecError`` where the job could never
    start: it alone takes more than the quota.
    """
    limit = limits(session)(owner)
    takes = share({"nodes": spec.world.nodes, "ranks_per_node": spec.world.ranks_per_node}, resolved.device)
    never = limit.never(takes)
    if never is not None:
        name, wants, most = never
        what, field = _FIELDS[name]
        text = f"the job takes {wants} {what}, the quota of {owner} is {most}: ask for fewer, or an admin for more"
        problem = FieldProblem(pointer=pointer + field, code=EXCEEDED, detail=text)
        raise SpecError(f"{problem.pointer or '/'}: {text}", errors=[problem])
    if more:
        _count(session, owner, limit)


def _count(session: Session, owner: str, limit: Limit) -> None:
    if limit.queued is None:
        return
    one_at_a_time(session, owner)
    there = queued(session, owner)
    if there >= limit.queued:
        raise Conflict(
            f"jobs of {owner} that have not ended: {there}, and its quota (queued) is {limit.queued}: wait for one to end, "
            "cancel one, or ask an admin for more",
            code=EXCEEDED,
        )


def one_at_a_time(session: Session, what: str) -> None:
    """Until the transaction's end nobody else who asks for ``what`` goes on."""
    if session.get_bind().dialect.name != "sqlite":  # whose write transactions follow one another as they are
        key = int.from_bytes(zlib.crc32(what.encode()).to_bytes(4), signed=True)
        session.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.cast(_DOOR, sa.Integer), sa.cast(key, sa.Integer))))
