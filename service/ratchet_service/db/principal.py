"""The caller of a request, and how a write transaction knows its caller."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy.orm import Session

from ratchet_contract.api.roles import LOCAL_OWNER, SCOPES, Role, Scope

_KEY: Final = "ratchet_caller"


@dataclass(frozen=True)
class Principal:
    """The authenticated caller of a request. ``token``, ``token_name``: id and name of its token, None without one.
    ``expires_at`` None: never."""

    owner: str
    role: Role
    scopes: frozenset[Scope]
    token: str | None = None
    expires_at: datetime | None = None
    token_name: str | None = None


LOCAL: Final = Principal(LOCAL_OWNER, Role.ADMIN, SCOPES[Role.ADMIN])
"""Every caller without a token, of a service that needs none."""


def session_info(caller: Principal | None) -> dict[str, Any]:
    """Return the ``info`` of a session, by which ``caller_of`` finds ``caller``."""
    return {_KEY: caller}


def caller_of(session: Session) -> Principal | None:
    """Return the caller of this transaction; None: the service itself."""
    found = session.info.get(_KEY)
    return found if isinstance(found, Principal) else None
