"""Bodies of the REST API about the queue."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ratchet_contract.api import Page, View


class QueuedView(View):
    """A job that waits for an attempt."""

    position: int | None = Field(
        description="From 1: in this order jobs start, each once there is room for it. null: a back-off holds it, or it is too "
        "far behind to be placed among several owners' jobs (`ahead_at_least`)."
    )
    ahead_at_least: int | None = Field(
        None, description="Where it is too far behind to have a position: so many jobs, or more, are ahead of it."
    )
    job_id: str
    name: str
    owner: str
    priority: int
    ranks: int = Field(description="That it takes; 0 where its stored spec cannot be read.")
    gpus: int
    reason: str | None = Field(
        None, description="Why it waits, as when the queue was last worked on; null: not yet told."
    )
    message: str | None = None
    created_at: datetime


class QueueView(Page[QueuedView]):
    """A page of the queue. Positions shift while pages are read, as jobs start and come."""

    waiting: int = Field(description="Jobs in the queue in all, without those that a back-off holds.")
