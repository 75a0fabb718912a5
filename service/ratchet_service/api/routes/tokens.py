"""Routes for API tokens and for the identity of the caller."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy.orm import Session

from ratchet_contract.api.roles import OWNER_PATTERN, Scope
from ratchet_contract.api.tokens import TokenMade, TokenRequest, TokenRevoked, TokenView, WhoAmI
from ratchet_contract.api.views import Page
from ratchet_service.api import openapi
from ratchet_service.api.authentication import Caller, needs
from ratchet_service.api.dependencies import Cursor, JsonPost, Limit, ServiceDep, reply
from ratchet_service.api.idempotency import Reply
from ratchet_service.api.request_body import parse
from ratchet_service.db.api_tokens import token_view
from ratchet_service.usecases import tokens

router = APIRouter(tags=["access"])


@router.get("/v1/whoami", dependencies=[needs(None)], summary="Identity and rights of the caller")
def whoami(service: ServiceDep, caller: Caller) -> WhoAmI:
    """The caller's owner name, role and scopes, and its token's id and expiry. 401 if the token is unknown, revoked or
    expired."""
    return WhoAmI(
        owner=caller.owner,
        role=caller.role,
        scopes=sorted(caller.scopes),
        token=caller.token,
        expires_at=caller.expires_at,
        tokens_required=service.settings.tokens_required,
    )


@router.post(
    "/v1/tokens",
    status_code=201,
    response_model=TokenMade,
    dependencies=[needs(Scope.TOKENS_WRITE)],
    openapi_extra=openapi.body(TokenRequest, openapi.TOKEN),
    summary="Make a token",
)
def create_token(post: JsonPost, caller: Caller) -> Response:
    """A caller creates tokens for itself, with at most its own rights and no later expiry; an admin creates them for any owner.
    The token's text is returned once: the response to a repeated request with the same Idempotency-Key has `token: null`."""
    poster, data = post
    request = parse(TokenRequest, data)

    def effect(session: Session, _: None) -> Reply:
        made = tokens.create(session, caller, request)
        kept = made.model_copy(update={"token": None}).model_dump_json()
        answer = reply(201, made, Location=f"/v1/tokens/{made.id}", Cache_Control="no-store")
        return Reply(answer.status, answer.body, answer.headers, stored_body=kept)

    return poster.run(lambda: None, effect)


@router.get("/v1/tokens", dependencies=[needs(Scope.TOKENS_WRITE)], summary="List tokens")
def list_tokens(
    service: ServiceDep,
    caller: Caller,
    owner: Annotated[str | None, Query(pattern=OWNER_PATTERN, description="Only tokens of this owner.")] = None,
    gone: Annotated[bool, Query(description="Include revoked and expired tokens.")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[TokenView]:
    """The caller's own tokens, newest first; an admin gets all owners' tokens. The response never has their text."""
    with service.database.read() as session:
        return tokens.list_tokens(session, caller, owner, gone, limit, cursor)


@router.get("/v1/tokens/{token_id}", dependencies=[needs(Scope.TOKENS_WRITE)], summary="Read a token")
def get_token(service: ServiceDep, caller: Caller, token_id: str) -> TokenView:
    """One of the caller's own tokens; an admin may read any token. The response never has its text."""
    with service.database.read() as session:
        return token_view(tokens.find(session, caller, token_id))


@router.delete("/v1/tokens/{token_id}", dependencies=[needs(Scope.TOKENS_WRITE)], summary="Revoke a token")
def revoke_token(service: ServiceDep, caller: Caller, token_id: str) -> TokenRevoked:
    """Revokes the token and all tokens made with it, directly or indirectly; their rows stay as a record. 403 if the token's role
    or scopes exceed the caller's."""
    with service.database.write(caller) as session:
        return tokens.revoke(session, caller, token_id)
