"""Bodies of the REST API about quotas."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.access import OWNER_PATTERN
from ratchet_contract.api import View

EVERYBODY: Final = "*"
"""In the place of an owner: the quota of each owner without one of its own."""
QUOTA_OWNER: Final = OWNER_PATTERN.replace("^", r"^(\*|", 1).removesuffix("$") + ")$"
_MOST: Final = 2**31 - 1


class QuotaRequest(BaseModel):
    """``PUT /v1/quotas/{owner}``: the whole quota. What is left out has no limit."""

    model_config = ConfigDict(extra="forbid")

    queued: int | None = Field(None, ge=0, le=_MOST, description="Jobs that have not ended, running ones included.")
    jobs: int | None = Field(None, ge=0, le=_MOST, description="Jobs with an attempt that has not ended.")
    ranks: int | None = Field(None, ge=0, le=_MOST, description="Ranks of such attempts.")
    gpus: int | None = Field(None, ge=0, le=_MOST, description="GPUs of such attempts.")


class QuotaUse(View):
    """What an owner has now."""

    queued: int
    jobs: int
    ranks: int
    gpus: int


class QuotaView(View):
    """``null``: no limit."""

    owner: str
    queued: int | None
    jobs: int | None
    ranks: int | None
    gpus: int | None
    source: Literal["own", "everybody", "none"] = Field(
        description="Where it comes from: the owner's own, that of `*`, or there is none."
    )
    in_use: QuotaUse | None = Field(
        description="What the owner has now; null for `*`, which counts for each by itself."
    )
    updated_at: datetime | None = None
