"""The audit log: one row for each change that a caller requests, for each token revoked with its maker, and for
each deletion at a ttl, added in the transaction of the change. Triggers refuse to change or delete rows. Rows refer to no other
table, so they stay when their job is deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction, SubjectKind
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import AuditEntry
from ratchet_service.db.principal import caller_of


def record(
    session: Session, action: AuditAction, kind: SubjectKind, subject: str, owner: str, data: Mapping[str, Any]
) -> None:
    """Add the row of a change by the session's caller. ``owner``: of the subject. ``data``: what changed, in few words; never a
    secret or a whole spec, since rows are kept for ever."""
    caller = caller_of(session)
    entry = AuditEntry(
        at=now_in(session), action=action.value, subject_kind=kind, subject=subject, owner=owner, data=dict(data)
    )
    if caller is not None:
        entry.actor, entry.role = caller.owner, caller.role
        entry.token, entry.token_name = caller.token, caller.token_name
    session.add(entry)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return old and new value of each key whose values differ; None stands for an absent key."""
    return {
        key: {"old": before.get(key), "new": after.get(key)}
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    }
