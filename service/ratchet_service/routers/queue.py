"""The queue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from ratchet_contract.access import Scope
from ratchet_contract.api_queue import QueueView
from ratchet_service.access import needs
from ratchet_service.http import Cursor, Limit, ServiceDep
from ratchet_service.usecases import queue

router = APIRouter(tags=["quotas"])
Of = Annotated[str | None, Query(max_length=100, description="Of this job alone.")]


@router.get("/v1/queue", dependencies=[needs(Scope.JOBS_READ)], summary="Who is next")
def get_queue(service: ServiceDep, limit: Limit = 50, cursor: Cursor = None, job_id: Of = None) -> QueueView:
    """Queued jobs in the order in which they start, and why each waits: by priority, then in turns of their owners, then age.

    Of everybody's; jobs whose back-off is not over are not in it. `job_id`: that job alone, with its position and what it
    waits for; no item where it is not queued.
    """
    with service.database.read() as session:
        return queue.page(session, limit, cursor) if job_id is None else queue.of_job(session, job_id)
