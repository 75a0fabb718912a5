"""Bodies of the REST API about tokens and who is asking."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.access import OWNER_PATTERN, Role, Scope
from ratchet_contract.api import View

MAX_DAYS = 3660
DEFAULT_DAYS = 90


class TokenRequest(BaseModel):
    """``POST /v1/tokens``."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("token", pattern=r"^[ -~]{1,63}$", description="For people: what the token is for.")
    owner: str | None = Field(
        None, pattern=OWNER_PATTERN, description="Whose jobs it submits and acts on; null: the caller's own name."
    )
    role: Role | None = Field(None, description="null: the caller's own.")
    scopes: list[Scope] = Field([], max_length=len(Scope), description="Only these; none: all that the role may.")
    expires_days: float | None = Field(
        DEFAULT_DAYS,
        gt=0,
        le=MAX_DAYS,
        allow_inf_nan=False,
        description="Days from now; null: never, which must be said. Not given: 90, or as long as the caller's own.",
    )


class TokenView(View):
    """A token without its text, which nobody can read again."""

    id: str
    name: str
    owner: str
    role: Role
    scopes: list[Scope] = Field(description="Empty: all that the role may.")
    created_at: datetime
    created_by: str
    made_with: str | None = Field(None, description="Id of the token that it was made with, and is revoked with.")
    expires_at: datetime | None = Field(description="null: never.")
    revoked_at: datetime | None = None
    last_used_at: datetime | None = Field(None, description="Within a minute.")


class TokenMade(TokenView):
    token: str | None = Field(
        description="The text to send as bearer token, shown this once. null: the answer to a repeated request with the same "
        "Idempotency-Key, which cannot have it; revoke this token and make another."
    )


class TokenRevoked(TokenView):
    """The answer to a revocation."""

    also_revoked: int = Field(
        description="How many others, made with it or with one of those, are refused from now on, too."
    )


class WhoAmI(View):
    """Who the service takes the caller for."""

    owner: str
    role: Role
    scopes: list[Scope] = Field(description="All that this caller may.")
    token: str | None = Field(None, description="Id of the token; null: none was needed.")
    expires_at: datetime | None = None
    tokens_required: bool = Field(description="false: whoever reaches this service on its own machine is its owner.")
