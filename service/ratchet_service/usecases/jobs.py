"""Changing what is not a phase of a job: labels and priority."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.api_requests import PatchRequest
from ratchet_contract.errors import Refused, SpecError
from ratchet_contract.phases import Event
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_parse import problem_of
from ratchet_service.clock import now_in
from ratchet_service.models import Job, JobLabel
from ratchet_service.transitions import add_event, check
from ratchet_service.usecases.queries import hold_job
from ratchet_service.usecases.submit import label_rows
from ratchet_service.usecases.views import labels_of


def etag(job: Job) -> str:
    """Changes with phase, wish, labels and priority; progress alone does not change it."""
    return f'"{job.version}"'


def require_match(job: Job, if_match: str | None) -> None:
    """RFC 9110, 13.1.1: ``*`` or a list of strong tags. Raises ``Refused`` (``precondition-failed``)."""
    if if_match is None:
        return
    tags = [tag.strip() for tag in if_match.split(",")]
    if "*" not in tags and etag(job) not in tags:
        raise Refused(
            f"the job has changed: it is at {etag(job)} now, not {if_match}; read it again", code="precondition-failed"
        )


def patch(session: Session, job_id: str, request: PatchRequest, if_match: str | None) -> Job:
    """Set labels (null removes one) and priority. Raises ``SpecError``, ``Refused``, ``NotFound``."""
    job = hold_job(session, job_id)
    check(job, Event.PATCH)
    require_match(job, if_match)
    changes: dict[str, Any] = {}
    if request.labels is not None:
        before = labels_of(session, [job_id])[job_id]
        after = {k: v for k, v in (before | request.labels).items() if v is not None}
        _check_labels(after)
        if after != before:
            session.execute(sa.delete(JobLabel).where(JobLabel.job_id == job_id))
            session.add_all(label_rows(job, after))
            changes["labels"] = after
    if request.priority is not None and request.priority != job.priority:
        job.priority = request.priority
        changes["priority"] = request.priority
    if changes:
        job.version += 1
        job.updated_at = now_in(session)
        add_event(session, job_id, "patched", f"changed: {', '.join(sorted(changes))}", data=changes)
    session.flush()
    return job


def _check_labels(labels: dict[str, str]) -> None:
    """By the spec's own rules."""
    try:
        JobSpec.model_validate({"name": "x", "script": ["x.py"], "labels": labels})
    except ValidationError as error:
        problems = [problem_of(fault, JobSpec) for fault in error.errors(include_url=False)]
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", code="invalid-body", errors=problems) from None
