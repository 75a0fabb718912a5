"""Update a job's labels and priority."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.requests import PatchRequest
from ratchet_contract.errors import SpecError
from ratchet_contract.phases import Event, EventType
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import problem_of
from ratchet_service.db import audit
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Job, JobLabel
from ratchet_service.db.queries import find_job_for_update, require_match
from ratchet_service.db.transitions import add_event, check_transition
from ratchet_service.usecases.submit import label_rows
from ratchet_service.usecases.views import labels_of


def patch(session: Session, job_id: str, request: PatchRequest, if_match: str | None) -> Job:
    """Change the job's labels and priority, and return its row; a label with the value null is removed. ``if_match``: the
    If-Match header. Raise ``SpecError``, ``Refused`` or ``NotFound``."""
    job = find_job_for_update(session, job_id)
    check_transition(job, Event.PATCH)
    require_match(job, if_match)
    changes: dict[str, Any] = {}
    recorded: dict[str, Any] = {}
    if request.labels is not None:
        before = labels_of(session, [job_id])[job_id]
        after = {k: v for k, v in (before | request.labels).items() if v is not None}
        _check_labels(after)
        if after != before:
            session.execute(sa.delete(JobLabel).where(JobLabel.job_id == job_id))
            session.add_all(label_rows(job, after))
            changes["labels"] = after
            recorded["labels"] = audit.differences(before, after)
    if request.priority is not None and request.priority != job.priority:
        recorded |= audit.differences({"priority": job.priority}, {"priority": request.priority})
        job.priority = request.priority
        changes["priority"] = request.priority
    if changes:
        job.version += 1
        job.updated_at = now_in(session)
        add_event(session, job_id, EventType.PATCHED, f"changed: {', '.join(sorted(changes))}", data=changes)
        audit.record(session, AuditAction.PATCH, "job", job_id, job.owner, recorded)
    session.flush()
    return job


def _check_labels(labels: dict[str, str]) -> None:
    """Raise ``SpecError`` (``invalid-body``) for labels that the spec's rules do not allow."""
    try:
        JobSpec.model_validate({"name": "x", "script": ["x.py"], "labels": labels})
    except ValidationError as error:
        problems = [problem_of(fault, JobSpec) for fault in error.errors(include_url=False)]
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", code="invalid-body", errors=problems) from None
