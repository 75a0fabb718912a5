"""Calls about webhooks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import quote

from ratchet_client.resources.requests import PAGE, Calls
from ratchet_contract.api import webhooks as api_webhooks


class Webhooks(Calls):
    """The methods of ``RatchetClient`` for webhooks. Each needs an admin's token."""

    def create_webhook(self, url: str, *, types: Collection[str] = (), owner: str | None = None, label: str | None = None,
                       format: api_webhooks.Format = "standard") -> api_webhooks.WebhookMade:  # fmt: skip
        """Create a webhook for the endpoint ``url``, and return it. ``types``: only events of these types; by default those of
        docs/webhooks.md. ``owner``, ``label``: only events of this owner's jobs, or of jobs with this label (``key=value``).
        ``format``: ``standard`` (Standard Webhooks) or ``slack`` (the URL is one of Slack's incoming webhooks).

        ``secret`` of the result is returned only once. It is None for the format ``slack``, and if this call was retried after
        its first response was lost. Raises ``SpecError`` for an invalid argument, ``Conflict`` if there are too many webhooks.
        """
        body: dict[str, Any] = {"url": url, "owner": owner, "label": label, "format": format}
        if types:
            body["types"] = list(types)
        return self._post("/v1/webhooks", api_webhooks.WebhookMade, json=body)

    def webhooks(self) -> Iterator[api_webhooks.WebhookView]:
        """Yield all webhooks, oldest first."""
        return self._pages("/v1/webhooks", api_webhooks.WebhookView, {})

    def webhook(self, webhook_id: str) -> api_webhooks.WebhookView:
        """Return the webhook with this id. Raises ``NotFound``."""
        return self._get(_path(webhook_id), api_webhooks.WebhookView)

    def change_webhook(self, webhook_id: str, request: api_webhooks.WebhookChange) -> api_webhooks.WebhookView:
        """Change what ``request`` has set, and return the webhook. Raises ``NotFound``."""
        body = request.model_dump(mode="json", exclude_unset=True)
        answer = self._transport.request("PATCH", _path(webhook_id), json=body)
        return api_webhooks.WebhookView.model_validate(answer.json())

    def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook with its deliveries. Raises ``NotFound``."""
        self._transport.request("DELETE", _path(webhook_id))

    def rotate_webhook_secret(self, webhook_id: str) -> api_webhooks.WebhookMade:
        """Give the webhook a new secret, and return it, as ``create_webhook`` does. For 24 hours the old secret signs too. Raises
        ``NotFound``, and ``Conflict`` for the format ``slack``."""
        return self._post(f"{_path(webhook_id)}/rotate", api_webhooks.WebhookMade)

    def test_webhook(self, webhook_id: str) -> api_webhooks.WebhookTest:
        """Send a test event now, and return the result; this takes at most 10 seconds. Raises ``NotFound``."""
        return self._post(f"{_path(webhook_id)}/test", api_webhooks.WebhookTest)

    def webhook_deliveries(self, webhook_id: str, limit: int = PAGE) -> list[api_webhooks.DeliveryView]:
        """Return the deliveries of at most ``limit`` (maximum 100) events, newest event first. Raises ``NotFound``."""
        return list(self._pages(f"{_path(webhook_id)}/deliveries", api_webhooks.DeliveryView, {"limit": limit}))


def _path(webhook_id: str) -> str:
    """Return the API path of a webhook."""
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
