"""Calls about tokens and who is asking."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal
from urllib.parse import quote

from ratchet_client.calls import PAGE, Calls
from ratchet_client.transport import Params
from ratchet_contract import api_access
from ratchet_contract.access import Role, Scope


class Access(Calls):
    """Part of ``RatchetClient``."""

    def whoami(self) -> api_access.WhoAmI:
        """Whose token this client sends, and what it may.

        >>> client.whoami().role.value
        'admin'
        """
        return self._get("/v1/whoami", api_access.WhoAmI)

    def create_token(self, name: str = "token", *, owner: str | None = None, role: Role | str | None = None,
                     scopes: Collection[Scope | str] = (), expires_days: float | Literal["never"] | None = None
                     ) -> api_access.TokenMade:  # fmt: skip
        """Make a token called ``name``: for the caller's own name, role and scopes, unless ``owner``, ``role`` and ``scopes`` are
        others. ``expires_days``: 90 unless given, but
        no longer than the caller's own.

        Its ``token`` is the text, told this once. Raises ``Refused`` (``not-allowed``) for more than the caller has.

        >>> made = client.create_token("notebook", role="viewer", expires_days=1)
        >>> client.revoke_token(made.id).revoked_at is not None
        True
        """
        body: dict[str, Any] = {"name": name, "owner": owner, "role": role, "scopes": list(scopes)}
        if expires_days is not None:
            body["expires_days"] = None if expires_days == "never" else expires_days
        return self._post("/v1/tokens", api_access.TokenMade, json=body)

    def tokens(self, *, owner: str | None = None, gone: bool = False) -> Iterator[api_access.TokenView]:
        """Tokens without their text, newest first: the caller's own, an admin's are all. ``gone``: those that were revoked or
        have expired, too."""
        params: Params = {"owner": owner, "gone": "true" if gone else None, "limit": PAGE}
        return self._pages("/v1/tokens", api_access.TokenView, params)

    def revoke_token(self, token_id: str) -> api_access.TokenRevoked:
        """Have the token with the id ``token_id`` refused from now on, and all that were made with it. Raises ``NotFound``,
        and ``Refused`` (``not-allowed``) for one with a role or scopes that the caller has not."""
        answer = self._transport.request("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")
        return api_access.TokenRevoked.model_validate(answer.json())
