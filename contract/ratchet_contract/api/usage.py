"""Bodies of the REST API about hours of GPUs, CPU slots and ranks."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ratchet_contract.api.views import View


class UsageItem(View):
    """What the jobs of one owner, or with one value of a label, have used in the interval."""

    value: str | None = Field(description="The owner, or the label's value; null: jobs without the label.")
    jobs: int = Field(description="Number of jobs with an attempt in the interval.")
    attempts: int = Field(description="Number of attempts that ran in the interval, whole or in part.")
    gpu_hours: float = Field(description="Hours since the start of each attempt within the interval, times its GPUs.")
    cpu_hours: float = Field(description="As `gpu_hours`, times the attempt's CPU slots of the launcher `local`.")
    rank_hours: float = Field(description="As `gpu_hours`, times the attempt's ranks, with and without a GPU.")


class UsageView(View):
    """What attempts have used in an interval, with the most GPU hours first. The hours of deleted jobs are not included."""

    since: datetime
    until: datetime = Field(description="End of the interval, which is not part of it.")
    by: str = Field(description="`owner`, or `label:KEY`.")
    items: list[UsageItem]
