"""Route for the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from ratchet_contract.api.audit import AuditAction, AuditView
from ratchet_contract.api.roles import Scope
from ratchet_contract.api.views import Page
from ratchet_service.api.authentication import Caller, needs
from ratchet_service.api.dependencies import Cursor, Limit, ServiceDep, Time
from ratchet_service.usecases import audit

router = APIRouter(tags=["access"])


@router.get("/v1/audit", dependencies=[needs(Scope.JOBS_READ)], summary="Who changed what, and when")
def list_audit(
    service: ServiceDep,
    caller: Caller,
    actor: Annotated[str | None, Query(max_length=100, description="Owner of the caller's token, or `local`.")] = None,
    owner: Annotated[str | None, Query(max_length=100, description="Owner of the subject.")] = None,
    action: Annotated[AuditAction | None, Query(description="Only this action.")] = None,
    subject: Annotated[
        str | None, Query(max_length=100, description="Id of a job or token, owner of a quota, or digest of code.")
    ] = None,
    since: Annotated[Time | None, Query(description="Only changes since then.")] = None,
    until: Annotated[Time | None, Query(description="Only changes before then.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[AuditView]:
    """Every change that a request or the service itself has made, newest first. An admin gets all of them; others get the
    changes to their own jobs and tokens, and their own actions. Changes to tokens need the scope `tokens:write`. Entries are
    kept for ever."""
    wanted = audit.AuditFilter(actor, owner, action, subject, since, until)
    with service.database.read() as session:
        return audit.list_entries(session, caller, wanted, limit, cursor)
