"""Bodies of the REST API about quotas."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.api.roles import OWNER_PATTERN
from ratchet_contract.api.views import View

EVERYBODY: Final = "*"
"""Takes the place of an owner: the quota of each owner without a quota of its own."""
QUOTA_OWNER: Final = OWNER_PATTERN.replace("^", r"^(\*|", 1).removesuffix("$") + ")$"
_MOST: Final = 2**31 - 1


class QuotaRequest(BaseModel):
    """Body of ``PUT /v1/quotas/{owner}``: the whole new quota. An omitted key has no limit."""

    model_config = ConfigDict(extra="forbid")

    queued: int | None = Field(None, ge=0, le=_MOST, description="Jobs that have not ended, running ones included.")
    jobs: int | None = Field(None, ge=0, le=_MOST, description="Jobs with an attempt that has not ended.")
    ranks: int | None = Field(None, ge=0, le=_MOST, description="Ranks of such attempts.")
    gpus: int | None = Field(None, ge=0, le=_MOST, description="GPUs of such attempts.")


class QuotaUse(View):
    """What an owner uses at present."""

    queued: int
    jobs: int
    ranks: int
    gpus: int


class QuotaView(View):
    """An owner's quota; ``null``: no limit."""

    owner: str
    queued: int | None
    jobs: int | None
    ranks: int | None
    gpus: int | None
    source: Literal["own", "everybody", "none"] = Field(
        description="Source of the quota: the owner's own, that of `*`, or none."
    )
    in_use: QuotaUse | None = Field(
        description="The owner's current use; null for `*`, which applies to each owner separately."
    )
    updated_at: datetime | None = None
