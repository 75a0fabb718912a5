"""The queue."""

from __future__ import annotations

from fastapi import APIRouter

from ratchet_contract.access import Scope
from ratchet_contract.api import Page
from ratchet_contract.api_queue import QueuedView
from ratchet_service.access import needs
from ratchet_service.http import Limit, ServiceDep
from ratchet_service.usecases import queue

router = APIRouter(tags=["quotas"])


@router.get("/v1/queue", dependencies=[needs(Scope.JOBS_READ)], summary="Who is next")
def get_queue(service: ServiceDep, limit: Limit = 50) -> Page[QueuedView]:
    """Queued jobs in the order in which they start, and why each waits: by priority, then in turns of their owners, then age.

    One page, of everybody's; jobs whose back-off is not over are not in it.
    """
    with service.database.read() as session:
        return queue.first(session, limit)
