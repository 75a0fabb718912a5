"""Convert database rows to API views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.views import (
    AttemptView,
    BudgetView,
    CheckpointView,
    EventView,
    JobView,
    NodeView,
    ProgressView,
    ResumeReportView,
    StragglerView,
    Warning_,
)
from ratchet_contract.checkpoint.resume_report import Base, ResumeReport, Segment, lineage_contains, proof_text
from ratchet_contract.paths import checkpoint_dir_name
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.masking import masked_spec
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint, Event, Job, JobLabel
from ratchet_service.lifecycle.redone_steps import differing_metrics, redone_of, with_replay_verdict
from ratchet_service.scheduling.node_faults import planned_exclusions
from ratchet_service.usecases.goodput import Spent


def labels_of(session: Session, job_ids: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the labels of each job, by job id; a job without labels has an empty dict."""
    ids = list(job_ids)
    out: dict[str, dict[str, str]] = {job_id: {} for job_id in ids}
    for row in session.scalars(sa.select(JobLabel).where(JobLabel.job_id.in_(ids)).order_by(JobLabel.key)):
        out[row.job_id][row.key] = row.value
    return out


def job_view(session: Session, job: Job) -> JobView:
    """Return the API's view of the job, with its labels and with secret values masked."""
    return job_views(session, [job])[0]


def job_views(session: Session, jobs: Sequence[Job]) -> list[JobView]:
    """Return the API's views of the jobs, in their order; the labels of all are read with one query."""
    labels = labels_of(session, [job.id for job in jobs])
    return [_job_view(job, labels[job.id]) for job in jobs]


def _job_view(job: Job, labels: dict[str, str]) -> JobView:
    """Return the API's view of the job with ``labels``; secret values in its spec are masked."""
    policy = job.spec["policy"]
    return JobView(
        id=job.id,
        name=job.name,
        owner=job.owner,
        phase=job.phase,
        desired=job.desired,
        reason=job.reason,
        message=job.message,
        labels=labels,
        priority=job.priority,
        spec=masked_spec(job.spec),
        resolved=Resolved.model_validate(job.resolved),
        warnings=[Warning_.model_validate(w) for w in job.warnings],
        attempt=job.attempt,
        progress=ProgressView(
            step=job.step,
            total_steps=job.total_steps,
            data_epoch=job.data_epoch,
            steps_at_risk=max(0, job.step - job.committed_step),
            steps_per_second=job.steps_per_second if job.phase is JobPhase.RUNNING else None,
        ),
        budgets=BudgetView(
            preemptions=job.preemptions,
            max_preemptions=policy["max_preemptions"],
            failures=job.failures,
            max_failures=policy["max_failures"],
            attempts_without_progress=job.attempts_without_progress,
        ),
        hook=job.spec["hook"]["name"],
        last_checkpoint=last_checkpoint(job),
        forked_from=job.forked_from,
        adopted_from=(job.fork_source or {}).get("adopted"),
        created_at=job.created_at,
        updated_at=job.updated_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        not_before=job.not_before,
    )


def last_checkpoint(job: Job) -> str | None:
    """Return the id of the newest committed checkpoint in the job's own lineage; None if there is none."""
    return None if job.committed_attempt is None else checkpoint_dir_name(job.committed_step, job.committed_attempt)


def attempt_view(
    attempt: Attempt, nodes: Iterable[AttemptNode], spent: Spent, *, components: bool = True
) -> AttemptView:
    """Return the API's view of the attempt. ``spent``: its goodput and the use of its stop notice. ``components``: with those of
    its resume report."""
    base = None
    if attempt.base_step is not None:
        base = Base(step=attempt.base_step, attempt=attempt.base_attempt, digest=attempt.base_digest)
    redone = redone_of(attempt.redone)
    stored = attempt.resume_report
    left_out: dict[str, Any] = {} if components else {"components": []}
    report = None if stored is None else ResumeReport.model_validate(stored | left_out)
    return AttemptView(
        job_id=attempt.job_id,
        number=attempt.number,
        phase=attempt.phase,
        outcome=attempt.outcome,
        cause=attempt.cause,
        rank=attempt.rank,
        exit_code=attempt.exit_code,
        message=attempt.message,
        base=base,
        last_step=attempt.last_step,
        steps_done=max(0, attempt.last_step - attempt.base_step) if attempt.base_step is not None else 0,
        steps_lost=attempt.steps_lost,
        committed_step=attempt.committed_step,
        resume_report=None if report is None else ResumeReportView(**dict(with_replay_verdict(report, redone))),
        proof=None if report is None else proof_text(report, redone),
        redone=redone,
        metrics_differ=differing_metrics(attempt, redone),
        nodes=[
            NodeView(node=n.node, host=n.host, pid=n.pid, gpus=n.gpus, phase=n.phase, address=n.address) for n in nodes
        ],
        stragglers=[StragglerView.model_validate(one) for one in (attempt.stragglers or {}).values()],
        excluded_nodes=planned_exclusions(attempt.launch),
        created_at=attempt.created_at,
        begun_at=attempt.begun_at,
        training_at=attempt.training_at,
        stop_at=attempt.stop_at,
        notice_seconds=spent.notice_seconds,
        notice_used=spent.notice_used,
        ended_at=attempt.ended_at,
        goodput=spent.goodput,
    )


def checkpoint_view(row: Checkpoint, segments: Sequence[Segment], metric: float | None = None) -> CheckpointView:
    """Return the API's view of the checkpoint. ``segments``: the job's lineage; ``metric``: the value by which ``keep_best``
    ranks it."""
    return CheckpointView.model_validate(
        {
            "id": row.name,
            "job_id": row.job_id,
            "step": row.step,
            "attempt": row.attempt,
            "parent": None if row.parent is None else Base.model_validate(row.parent),
            "state": row.state,
            "reason": row.reason,
            "finished": row.finished,
            "adopted": row.adopted,
            "pinned": row.pinned,
            "digest": row.digest,
            "size": row.size,
            "files": row.files,
            "seconds": row.seconds,
            "stall": row.stall,
            "verified_at": row.verified_at,
            "verification": row.verification,
            "verification_error": row.verification_error,
            "hook_iteration": row.hook_iteration,
            "lineage": "current" if lineage_contains(segments, row.step, row.attempt) else "abandoned",
            "metric": metric,
            "uri": row.uri,
            "uploaded_at": row.uploaded_at,
            "created_at": row.created_at,
        }
    )


def event_view(row: Event) -> EventView:
    """Return the API's view of the event."""
    return EventView(
        id=row.id, job_id=row.job_id, at=row.at, type=row.type, attempt=row.attempt, message=row.message, data=row.data
    )
