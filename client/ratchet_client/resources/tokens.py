"""Calls about tokens, the caller's identity and the audit log."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal
from urllib.parse import quote

from ratchet_client.http.transport import Params
from ratchet_client.resources.requests import PAGE, Calls
from ratchet_contract.api import audit as api_audit
from ratchet_contract.api import tokens as api_tokens
from ratchet_contract.api.roles import Role, Scope


class Access(Calls):
    """The methods of ``RatchetClient`` for tokens and the audit log."""

    def whoami(self) -> api_tokens.WhoAmI:
        """Return the caller's owner, role and scopes, which are those of the token that this client sends. If the service needs
        no token, the caller is the owner ``local`` with the role admin.

        >>> client.whoami().role.value
        'admin'
        """
        return self._get("/v1/whoami", api_tokens.WhoAmI)

    def create_token(self, name: str = "token", *, owner: str | None = None, role: Role | str | None = None,
                     scopes: Collection[Scope | str] = (), expires_days: float | Literal["never"] | None = None
                     ) -> api_tokens.TokenMade:  # fmt: skip
        """Create a token called ``name`` and return it. ``owner`` and ``role`` are by default the caller's own. ``scopes``: the
        token has only these; by default all scopes of its role. ``expires_days``: the lifetime in days, or "never"; default: 90,
        but not longer than that of the caller's token.

        ``token`` of the result is the token's text, which is returned only once. It is None if this call was retried after its
        first response was lost. Raises ``Refused`` if the new token would have more rights or a later expiry than the caller's,
        and for another owner unless the caller is an admin. Raises ``Conflict`` if the owner has too many valid tokens.

        >>> made = client.create_token("notebook", role="viewer", expires_days=1)
        >>> client.revoke_token(made.id).revoked_at is not None
        True
        """
        body: dict[str, Any] = {"name": name, "owner": owner, "role": role, "scopes": list(scopes)}
        if expires_days is not None:
            body["expires_days"] = None if expires_days == "never" else expires_days
        return self._post("/v1/tokens", api_tokens.TokenMade, json=body)

    def tokens(self, *, owner: str | None = None, gone: bool = False) -> Iterator[api_tokens.TokenView]:
        """Yield the caller's tokens without their text, newest first. An admin gets those of all owners, or only of ``owner``.
        ``gone``: include revoked and expired tokens."""
        params: Params = {"owner": owner, "gone": "true" if gone else None, "limit": PAGE}
        return self._pages("/v1/tokens", api_tokens.TokenView, params)

    def revoke_token(self, token_id: str) -> api_tokens.TokenRevoked:
        """Revoke the token with the id ``token_id``, and all tokens that were created with it, directly or indirectly. Raises
        ``NotFound``, and ``Refused`` (``not-allowed``) for a token with rights that the caller lacks."""
        answer = self._transport.request("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")
        return api_tokens.TokenRevoked.model_validate(answer.json())

    def audit(self, *, actor: str | None = None, owner: str | None = None, action: api_audit.AuditAction | str | None = None,
              subject: str | None = None, since: str | None = None, until: str | None = None,
              page_size: int = PAGE) -> Iterator[api_audit.AuditView]:  # fmt: skip
        """Yield the changes that the audit log has, newest first. An admin gets all of them; others get the changes to their own
        jobs and tokens, and their own actions. Changes to tokens need the scope ``tokens:write``. ``actor``: the owner of the
        caller's token. ``owner``: the owner of the changed job, token or quota. ``subject``: its id. ``action``: only this
        action, such as ``cancel``. ``since``, ``until``: RFC 3339 times with a time zone; ``until`` is not part of the interval.

        >>> any(entry.action == "submit" for entry in client.audit(subject=job_id))
        True
        """
        params: Params = {
            "actor": actor,
            "owner": owner,
            "action": action,
            "subject": subject,
            "since": since,
            "until": until,
            "limit": page_size,
        }
        return self._pages("/v1/audit", api_audit.AuditView, params)
