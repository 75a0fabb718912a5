"""Bodies of the REST API about the audit log."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from ratchet_contract.api.roles import Role
from ratchet_contract.api.views import View

SubjectKind = Literal["job", "token", "quota", "code", "webhook"]


class AuditAction(StrEnum):
    """The changes that the audit log records. The words for the actions on a job are those of its events."""

    SUBMIT = "submit"
    ADOPT = "adopt"  # a submission that continues a run without a service
    FORK = "fork"
    PATCH = "patch"
    SUSPEND = "suspend"
    RESUME = "resume"
    CANCEL = "cancel"
    PREEMPT = "preempt"
    CHECKPOINT = "checkpoint"
    DELETE = "delete"
    DELETE_OUTPUTS = "delete-outputs"  # of a job that was deleted without them
    VERIFY = "verify"
    PIN = "pin"
    UNPIN = "unpin"
    PRUNE = "prune"
    UPLOAD = "upload"
    CREATE_TOKEN = "create-token"
    REVOKE_TOKEN = "revoke-token"
    SET_QUOTA = "set-quota"
    DELETE_QUOTA = "delete-quota"
    CREATE_WEBHOOK = "create-webhook"
    CHANGE_WEBHOOK = "change-webhook"
    ROTATE_WEBHOOK = "rotate-webhook"
    DELETE_WEBHOOK = "delete-webhook"


class AuditView(View):
    """One change: who made it, when, and what changed."""

    id: int
    at: datetime
    actor: str | None = Field(
        description="Owner of the caller's token; `local`: a caller without a token; null: the service itself, which deletes "
        "jobs at their ttl."
    )
    role: Role | None = Field(description="The caller's role; null: the service itself.")
    token: str | None = Field(description="Id of the caller's token; null: none was needed.")
    token_name: str | None
    action: AuditAction
    subject_kind: SubjectKind
    subject: str = Field(
        description="Id of the job, token or webhook, owner of the quota, or digest of the code. It may be deleted since."
    )
    owner: str = Field(description="Owner of the subject.")
    data: dict[str, Any] = Field(
        description='What changed, such as `{"priority": {"old": 0, "new": 5}}`. Never a secret or a whole spec.'
    )
