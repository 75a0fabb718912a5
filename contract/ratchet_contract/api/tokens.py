"""Bodies of the REST API about tokens and the caller's identity."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.api.roles import OWNER_PATTERN, Role, Scope
from ratchet_contract.api.views import View

MAX_DAYS = 3660
DEFAULT_DAYS = 90


class TokenRequest(BaseModel):
    """Body of ``POST /v1/tokens``: the token to create."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("token", pattern=r"^[ -~]{1,63}$", description="For people: what the token is for.")
    owner: str | None = Field(
        None, pattern=OWNER_PATTERN, description="Owner of the jobs that it submits and acts on; null: the caller."
    )
    role: Role | None = Field(None, description="null: the caller's own.")
    scopes: list[Scope] = Field(
        [], max_length=len(Scope), description="Only these scopes; none: all scopes of the role."
    )
    expires_days: float | None = Field(
        DEFAULT_DAYS,
        gt=0,
        le=MAX_DAYS,
        allow_inf_nan=False,
        description="Days until it expires; null: never, which must be set explicitly. Omitted: 90, or as long as the "
        "caller's own token.",
    )


class TokenView(View):
    """A token without its secret text, which cannot be read again."""

    id: str
    name: str
    owner: str
    role: Role
    scopes: list[Scope] = Field(description="Empty: all scopes of the role.")
    created_at: datetime
    created_by: str
    made_with: str | None = Field(
        None, description="Id of the token it was made with; revoking that one revokes it too."
    )
    expires_at: datetime | None = Field(description="null: never.")
    revoked_at: datetime | None = None
    last_used_at: datetime | None = Field(None, description="Within a minute.")


class TokenMade(TokenView):
    token: str | None = Field(
        description="The text to send as bearer token, shown this once. null: the response to a repeated request with the "
        "same Idempotency-Key, which cannot contain it; revoke this token and create another."
    )


class TokenRevoked(TokenView):
    """The token that was revoked."""

    also_revoked: int = Field(
        description="Number of other tokens, made with it directly or indirectly, that are revoked too."
    )


class WhoAmI(View):
    """Identity and rights of the caller."""

    owner: str
    role: Role
    scopes: list[Scope] = Field(description="All scopes of this caller.")
    token: str | None = Field(None, description="Id of the token; null: none was needed.")
    expires_at: datetime | None = None
    tokens_required: bool = Field(description="false: any process on the service's machine may act as its owner.")
