"""Where nobody needs a token: only this machine's own programs come in, no web page and no proxy on behalf of others.

A browser here sends requests for any page that it shows: under a foreign name that leads to 127.0.0.1 (DNS rebinding), or from
another origin. A proxy brings other machines' requests. Neither is the owner of the run directory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet_service.edge import problem_response

_HOST: Final = re.compile(r"(localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_PROXIED: Final = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
_CURE: Final = "start the service with --auth token and send a token"


class OwnMachineOnly:
    """ASGI layer; 403 ``foreign-origin``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            fault = _fault(scope["headers"], scope["scheme"])
            if fault is not None:
                text = f"no token is needed here, so that only programs of this machine may ask: {fault}; {_CURE}"
                await problem_response(403, "foreign-origin", text, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _fault(headers: Sequence[tuple[bytes, bytes]], scheme: str) -> str | None:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1 or _HOST.fullmatch(hosts[0]) is None:
        return f"the request is for {', '.join(hosts)[:100] or 'no host'!r}"
    for name, value in headers:
        text = value.decode("latin-1")
        if name in _PROXIED:
            return f"the request came through a proxy ({name.decode()})"
        if name == b"origin" and text.lower() != f"{scheme}://{hosts[0]}".lower():
            return f"the request is of a web page of {text[:100]!r}"
        if name == b"sec-fetch-site" and text not in ("same-origin", "none"):
            return "the request is of another site's web page"
    return None
