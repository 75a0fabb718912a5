"""Bodies of the REST API about the queue."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ratchet_contract.api.views import Page, View


class QueuedView(View):
    """A job that waits for an attempt."""

    position: int | None = Field(
        description="Start order, from 1; a job starts once there are resources for it. null: it is in a back-off, or too "
        "far back for a position among several owners' jobs (`ahead_at_least`)."
    )
    ahead_at_least: int | None = Field(
        None, description="Lower bound of the number of jobs ahead of it, if it is too far back to have a position."
    )
    job_id: str
    name: str
    owner: str
    priority: int
    ranks: int = Field(description="Number of its ranks; 0 if its stored spec cannot be read.")
    gpus: int
    reason: str | None = Field(None, description="Why it waits, as of the scheduler's last pass; null: not yet known.")
    message: str | None = None
    created_at: datetime


class QueueView(Page[QueuedView]):
    """A page of the queue. Positions shift while pages are read, as jobs start and come."""

    waiting: int = Field(description="Number of jobs in the queue, without those in a back-off.")
