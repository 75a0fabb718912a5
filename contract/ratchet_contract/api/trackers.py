"""Answers of the API on experiment trackers."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ratchet_contract.api.views import View
from ratchet_contract.spec.tracking import TrackerName


class TrackerView(View):
    """A run of a job in an experiment tracker."""

    tracker: TrackerName | str = Field(description="tensorboard, mlflow or wandb.")
    run: str = Field(description="Name of the run: the job's id; after a branch also a number.")
    place: str | None = Field(None, description="URL of the run, or its directory; null: not known yet.")
    step: int | None = Field(None, description="Newest step that was sent; null: none yet.")
    done: bool = Field(description="All was sent: the job has ended, or a later run has the next steps.")
    failing_since: datetime | None = Field(
        None, description="When the tracker stopped to accept values; null: it does not fail."
    )
    next_try: datetime | None = Field(None, description="When it is tried again.")
    error: str | None = Field(None, description="Why the last try failed.")
