"""What ``decide`` is told of a job: from its row and its spec."""

from __future__ import annotations

from ratchet_contract.spec import JobSpec
from ratchet_service.decision import Counters, JobView, Limits
from ratchet_service.models import Job


def limits_of(spec: JobSpec) -> Limits:
    policy = spec.policy
    return Limits(
        policy.max_preemptions,
        policy.max_failures,
        policy.backoff,
        policy.timeout,
        policy.stop_grace,
        tuple(policy.exit_codes),
        other_code=spec.own_code is not None,
        script=spec.script is not None,
    )


def view_of(job: Job, limits: Limits) -> JobView:
    """What ``decide`` may know of the row; the attempt is added by who looks after it."""
    return JobView(
        job_id=job.id,
        phase=job.phase,
        desired=job.desired,
        desired_cause=job.desired_cause,
        epoch=job.epoch,
        counters=Counters(job.preemptions, job.failures, job.no_progress, job.retries),
        limits=limits,
        not_before=job.not_before,
        running_seconds=job.running_seconds,
    )
