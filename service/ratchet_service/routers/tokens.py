"""Tokens, and who the caller is."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy.orm import Session

from ratchet_contract.access import OWNER_PATTERN, Scope
from ratchet_contract.api import Page
from ratchet_contract.api_access import TokenMade, TokenRequest, TokenRevoked, TokenView, WhoAmI
from ratchet_service import examples, openapi
from ratchet_service.access import Caller, needs
from ratchet_service.bodies import parse
from ratchet_service.http import Cursor, JsonPost, Limit, ServiceDep, reply
from ratchet_service.idempotency import Reply
from ratchet_service.tokens import token_view
from ratchet_service.usecases import tokens

router = APIRouter(tags=["access"])


@router.get("/v1/whoami", dependencies=[needs(None)], summary="Who the service takes you for")
def whoami(service: ServiceDep, caller: Caller) -> WhoAmI:
    """401 for a token that is not, or no longer, one of this service."""
    return WhoAmI(
        owner=caller.owner,
        role=caller.role,
        scopes=sorted(caller.scopes),
        token=caller.token,
        expires_at=caller.expires_at,
        tokens_required=service.settings.tokens,
    )


@router.post(
    "/v1/tokens",
    status_code=201,
    response_model=TokenMade,
    dependencies=[needs(Scope.TOKENS_WRITE)],
    openapi_extra=openapi.body(TokenRequest, examples.TOKEN),
    summary="Make a token",
)
def create_token(post: JsonPost, caller: Caller) -> Response:
    """For oneself with no more than one's own rights and no later end; an admin makes them for anybody. The text is shown once:
    the answer to a repeated request with the same Idempotency-Key has `token: null`."""
    poster, data = post
    request = parse(TokenRequest, data)

    def effect(session: Session, _: None) -> Reply:
        made = tokens.create(session, caller, request)
        kept = made.model_copy(update={"token": None}).model_dump_json()
        answer = reply(201, made, Location=f"/v1/tokens/{made.id}", Cache_Control="no-store")
        return Reply(answer.status, answer.body, answer.headers, kept=kept)

    return poster.run(lambda: None, effect)


@router.get("/v1/tokens", dependencies=[needs(Scope.TOKENS_WRITE)], summary="List tokens")
def list_tokens(
    service: ServiceDep,
    caller: Caller,
    owner: Annotated[str | None, Query(pattern=OWNER_PATTERN, description="Only of this owner.")] = None,
    gone: Annotated[bool, Query(description="Those that were revoked or have expired, too.")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[TokenView]:
    """Newest first, one's own; an admin sees everybody's. Never their text."""
    with service.database.read() as session:
        return tokens.list_tokens(session, caller, owner, gone, limit, cursor)


@router.get("/v1/tokens/{token_id}", dependencies=[needs(Scope.TOKENS_WRITE)], summary="Read a token")
def get_token(service: ServiceDep, caller: Caller, token_id: str) -> TokenView:
    """One's own; an admin anybody's."""
    with service.database.read() as session:
        return token_view(tokens.find(session, caller, token_id))


@router.delete("/v1/tokens/{token_id}", dependencies=[needs(Scope.TOKENS_WRITE)], summary="Revoke a token")
def revoke_token(service: ServiceDep, caller: Caller, token_id: str) -> TokenRevoked:
    """It is refused from now on, and so are all that were made with it, and with those; their rows stay for the record. 403 for
    one with a role or scopes that the caller has not."""
    with service.database.write() as session:
        return tokens.revoke(session, caller, token_id)
