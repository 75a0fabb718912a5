"""Conditional requests (RFC 9110, 13.1.2): an answer that the client already has is not sent again."""

from __future__ import annotations

import xxhash
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def matches(known: str, etag: str) -> bool:
    """Return True if ``known``, the value of a header If-None-Match, is ``*`` or has ``etag`` in its list (weak comparison)."""
    tags = [tag.strip().removeprefix("W/") for tag in known.split(",")]
    return "*" in tags or etag.removeprefix("W/") in tags


class ConditionalRequests:
    """ASGI middleware for GET requests below ``/v1``. It adds a weak ETag, a digest of the body, to a JSON answer without
    an ETag of its own, and answers 304 if If-None-Match has this ETag. Streams and files pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. The head of a JSON answer is sent together with the body, which FastAPI sends in one message."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        head: Message | None = None

        async def send_conditional(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start" and _is_plain_json(message):
                head = message
                return
            if head is not None:
                start, head = head, None
                if not message.get("more_body", False):
                    start, message = _with_etag(start, message, Headers(scope=scope).get("if-none-match", ""))
                await send(start)
            await send(message)

        await self._app(scope, receive, send_conditional)


def _is_plain_json(start: Message) -> bool:
    """Return True for the head of an answer with JSON and without an ETag; errors have another media type."""
    headers = Headers(raw=start["headers"])
    return headers.get("content-type") == "application/json" and "etag" not in headers


def _with_etag(start: Message, body: Message, known: str) -> tuple[Message, Message]:
    """Return head and body with the ETag of ``body``; of status 304 and empty if ``known``, the header If-None-Match, has it."""
    headers = MutableHeaders(raw=start["headers"])
    etag = headers["etag"] = f'W/"{xxhash.xxh3_64_hexdigest(body["body"])}"'
    if matches(known, etag):
        del headers["content-length"], headers["content-type"]
        start["status"], body = 304, {**body, "body": b""}
    return {**start, "headers": headers.raw}, body
