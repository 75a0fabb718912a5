"""Routes for webhooks: endpoints of other programs that get jobs' events."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from ratchet_contract.api.roles import Scope
from ratchet_contract.api.views import Page
from ratchet_contract.api.webhooks import (
    DeliveryView,
    WebhookChange,
    WebhookMade,
    WebhookRequest,
    WebhookTest,
    WebhookView,
)
from ratchet_service.api import openapi
from ratchet_service.api.authentication import Caller, needs
from ratchet_service.api.dependencies import BodyDep, JsonPost, Limit, ServiceDep, reply, respond
from ratchet_service.api.idempotency import Reply
from ratchet_service.api.request_body import Nothing, decode, parse
from ratchet_service.usecases import webhooks
from ratchet_service.webhooks.send import Sender

router = APIRouter(tags=["webhooks"], dependencies=[needs(Scope.WEBHOOKS_WRITE)])


def _with_secret(status: int, made: WebhookMade, **headers: str) -> Reply:
    """Return an answer with the secret, which is not stored for repeated requests."""
    answer = reply(status, made, Cache_Control="no-store", **headers)
    kept = made.model_copy(update={"secret": None}).model_dump_json()
    return Reply(answer.status, answer.body, answer.headers, stored_body=kept)


@router.post(
    "/v1/webhooks",
    status_code=201,
    response_model=WebhookMade,
    openapi_extra=openapi.body(WebhookRequest, openapi.WEBHOOK, required=True),
    summary="Create a webhook",
)
def create_webhook(post: JsonPost, caller: Caller) -> Response:
    """From now on, events that match are sent to the URL. The secret is returned once: the response to a repeated request with
    the same Idempotency-Key has `secret: null`."""
    poster, data = post
    request = parse(WebhookRequest, data)

    def effect(session: Session, _: None) -> Reply:
        made = webhooks.create(session, caller.owner, request)
        return _with_secret(201, made, Location=f"/v1/webhooks/{made.id}")

    return poster.run(lambda: None, effect)


@router.get("/v1/webhooks", summary="List webhooks")
def list_webhooks(service: ServiceDep) -> Page[WebhookView]:
    """All webhooks on one page, oldest first, without their secrets."""
    with service.database.read() as session:
        return webhooks.list_webhooks(session)


@router.get("/v1/webhooks/{webhook_id}", summary="Read a webhook")
def get_webhook(service: ServiceDep, webhook_id: str) -> WebhookView:
    """One webhook, without its secret."""
    with service.database.read() as session:
        return webhooks.view(session, webhooks.find(session, webhook_id))


@router.patch(
    "/v1/webhooks/{webhook_id}",
    response_model=WebhookView,
    openapi_extra=openapi.body(WebhookChange, openapi.WEBHOOK_CHANGE, required=True),
    summary="Change, enable or disable a webhook",
)
def change_webhook(service: ServiceDep, caller: Caller, webhook_id: str, body: BodyDep) -> Response:
    """Changes the keys that are sent. `enabled: true` continues with the first event that was not delivered; with
    `from_now: true`, with new events."""
    request = parse(WebhookChange, decode(body))
    with service.database.write(caller) as session:
        view = webhooks.change(session, webhook_id, request)
    return respond(reply(200, view))


@router.delete("/v1/webhooks/{webhook_id}", status_code=204, summary="Delete a webhook")
def delete_webhook(service: ServiceDep, caller: Caller, webhook_id: str) -> Response:
    """Deletes the webhook with its deliveries. A request that is under way is not stopped."""
    with service.database.write(caller) as session:
        webhooks.delete(session, webhook_id)
    return Response(status_code=204)


@router.post(
    "/v1/webhooks/{webhook_id}/rotate",
    response_model=WebhookMade,
    openapi_extra=openapi.NO_BODY,
    summary="Give a webhook a new secret",
)
def rotate_webhook_secret(post: JsonPost, webhook_id: str) -> Response:
    """For 24 hours, deliveries have a signature with the new secret and one with the old. The secret is returned once."""
    poster, data = post
    parse(Nothing, data)
    return poster.run(lambda: None, lambda session, _: _with_secret(200, webhooks.rotate(session, webhook_id)))


@router.post(
    "/v1/webhooks/{webhook_id}/test",
    response_model=WebhookTest,
    openapi_extra=openapi.NO_BODY,
    summary="Send a test event",
)
def test_webhook(service: ServiceDep, post: JsonPost, webhook_id: str) -> Response:
    """Sends an event of the type `webhook.test` now, also to a disabled webhook, and answers with the result after at most 10
    seconds."""
    poster, data = post
    parse(Nothing, data)
    sender = Sender(service.settings.webhook_networks)
    return poster.run(lambda: webhooks.test(service.database, sender, webhook_id), lambda _, result: reply(200, result))


@router.get("/v1/webhooks/{webhook_id}/deliveries", summary="List a webhook's last deliveries")
def list_webhook_deliveries(service: ServiceDep, webhook_id: str, limit: Limit = 50) -> Page[DeliveryView]:
    """The newest events first, on one page; older deliveries that ended are not kept."""
    with service.database.read() as session:
        return webhooks.deliveries(session, webhook_id, limit)
