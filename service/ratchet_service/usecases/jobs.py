"""Reading jobs, and changing what is not a phase: labels and priority."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api import JobView, Page
from ratchet_contract.api_requests import PatchRequest
from ratchet_contract.errors import FieldProblem, Refused, SpecError
from ratchet_contract.phases import Event, JobPhase
from ratchet_contract.spec import JobSpec
from ratchet_service import cursors
from ratchet_service.clock import now_in
from ratchet_service.models import Job, JobLabel
from ratchet_service.transitions import add_event, check
from ratchet_service.usecases.queries import hold_job
from ratchet_service.usecases.views import job_views, labels_of

Sort = Literal["created", "-created", "name", "-name", "priority", "-priority"]
_COLUMNS: Final[dict[str, Any]] = {"created": Job.created_at, "name": Job.name, "priority": Job.priority}


@dataclass(frozen=True)
class JobFilter:
    """All given conditions hold together; several phases mean any of them."""

    phases: tuple[JobPhase, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    sort: Sort = "-created"
    owner: str | None = None

    def digest(self) -> str:
        phases = sorted(p.value for p in self.phases)
        return cursors.query_digest(
            of="jobs",
            phases=phases,
            labels=sorted(map(list, self.labels)),
            name=self.name,
            sort=self.sort,
            owner=self.owner,
        )


def parse_label(text: str) -> tuple[str, str]:
    """``key=value``. Raises ``Refused``."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise Refused(f"a label filter is key=value, not {text!r}", code="invalid-parameter")
    return key, value


def list_jobs(session: Session, wanted: JobFilter, limit: int, cursor: str | None) -> Page[JobView]:
    """Keyset paging: what is inserted meanwhile never repeats or hides a job that was there before."""
    descending = wanted.sort.startswith("-")
    key = wanted.sort.removeprefix("-")
    column = _COLUMNS[key]
    query = sa.select(Job)
    if wanted.phases:
        query = query.where(Job.phase.in_(wanted.phases))
    if wanted.name is not None:
        query = query.where(Job.name == wanted.name)
    if wanted.owner is not None:
        query = query.where(Job.owner == wanted.owner)
    for label, value in wanted.labels:
        has = sa.exists().where(JobLabel.job_id == Job.id, JobLabel.key == label, JobLabel.value == value)
        query = query.where(has)
    after = cursors.decode(cursor, wanted.digest(), (int if key == "priority" else str, str))
    if after is not None:
        row, position = sa.tuple_(column, Job.id), sa.tuple_(sa.literal(_value(key, after[0]), column.type), after[1])
        query = query.where(row < position if descending else row > position)
    order = (column.desc(), Job.id.desc()) if descending else (column, Job.id)
    rows = list(session.scalars(query.order_by(*order).limit(limit + 1)))
    page = rows[:limit]
    following = cursors.encode(wanted.digest(), [_text(key, page[-1]), page[-1].id]) if len(rows) > limit else None
    return Page[JobView](items=job_views(session, page), next_cursor=following)


def _text(key: str, job: Job) -> str | int:
    if key == "created":
        return job.created_at.isoformat()
    return job.name if key == "name" else job.priority


def _value(key: str, raw: Any) -> Any:
    if key != "created":
        return raw
    try:
        at = datetime.fromisoformat(raw)
        at.astimezone()
    except (ValueError, OverflowError):
        at = None
    if at is None or at.tzinfo is None:
        raise Refused("this cursor is not one that the server gave out; start again without it", code="bad-cursor")
    return at


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
            session.add_all(JobLabel(job_id=job_id, key=k, value=v) for k, v in after.items())
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
    except ValueError as error:
        first = error.errors()[0] if hasattr(error, "errors") else {"msg": str(error)}
        detail = str(first["msg"]).removeprefix("Value error, ")
        problem = FieldProblem(pointer="/labels", code="value-error", detail=detail)
        raise SpecError(f"/labels: {detail}", code="invalid-body", errors=[problem]) from None
