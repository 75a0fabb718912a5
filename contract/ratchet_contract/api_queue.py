"""Bodies of the REST API about the queue."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ratchet_contract.api import View


class QueuedView(View):
    """A job that waits for an attempt."""

    position: int = Field(description="From 1: in this order jobs start, each once there is room for it.")
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
