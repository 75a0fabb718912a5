"""What an older service says of its queue, in today's words: what it does not tell is None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ratchet_client.transport import Params
from ratchet_contract.api import JobView
from ratchet_contract.api_queue import QueuedView, QueueView
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.phases import JobPhase

MOST: Final = 100
"""Jobs that it gives at one time; it has no second page."""
_NO_ROUTE: Final = "no-such-route"
_NO_PARAMETER: Final = "unknown-parameter"

Get = Callable[[Params], QueueView]


@contextmanager
def said() -> Iterator[None]:
    """A service that has no queue to show answers as for any path that it does not know. Raises ``NotFound``."""
    try:
        yield
    except NotFound as error:
        if error.code != _NO_ROUTE:
            raise
        raise NotFound("the service is older than this client: it does not show its queue", code=_NO_ROUTE) from error


def asked(get: Get, limit: int) -> QueueView:
    """The first of the queue. ``waiting`` is None where the service does not tell."""
    with said():
        return get({"limit": limit})


def of_job(get: Get, job_id: str, job: Callable[[str], JobView]) -> QueueView:
    """Where a job stands: of a service that tells so of the first alone, by those. One that is queued and not among them is
    behind all of them, or a back-off holds it."""
    with said():
        try:
            return get({"job_id": job_id})
        except Refused as error:
            if error.code != _NO_PARAMETER:
                raise
        first = get({"limit": MOST}).items
    found = job(job_id)
    if found.phase is not JobPhase.QUEUED:
        return QueueView(items=[])
    return QueueView(items=[one for one in first if one.job_id == job_id] or [_unplaced(found, len(first))])


def _unplaced(job: JobView, ahead: int) -> QueuedView:
    world = job.spec.get("world", {})
    ranks = int(world.get("nodes", 1)) * int(world.get("ranks_per_node", 1))
    return QueuedView(
        position=None,
        ahead_at_least=ahead if ahead >= MOST and job.not_before is None else None,
        job_id=job.id,
        name=job.name,
        owner=job.owner,
        priority=job.priority,
        ranks=ranks,
        gpus=ranks if job.resolved.device == "cuda" else 0,
        reason=job.reason,
        message=job.message,
        created_at=job.created_at,
    )
