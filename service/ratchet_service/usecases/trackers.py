"""What experiment trackers have of a job, and what their export needs from other parts of the service."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.trackers import TrackerView
from ratchet_contract.api.views import Page
from ratchet_contract.paths import HomePaths
from ratchet_service.db.models import Job, TrackerRun
from ratchet_service.db.queries import find_job
from ratchet_service.trackers.plan import JobFacts, newest_step
from ratchet_service.trackers.sink import name_of
from ratchet_service.usecases.goodput import job_goodputs
from ratchet_service.usecases.job_history import newest_environment


def list_trackers(session: Session, job_id: str) -> Page[TrackerView]:
    """Return the job's runs in all trackers; none before it trains. Raise ``NotFound``."""
    find_job(session, job_id)
    query = sa.select(TrackerRun).where(TrackerRun.job_id == job_id).order_by(TrackerRun.sink, TrackerRun.number)
    return Page[TrackerView](items=[_view(run) for run in session.scalars(query)], next_cursor=None)


def _view(run: TrackerRun) -> TrackerView:
    step = newest_step(run)
    return TrackerView(
        tracker=run.sink,
        run=name_of(run.job_id, run.number),
        place=run.state.get("url") or run.state.get("path"),
        step=step if run.marks else None,
        done=run.done,
        failing_since=run.failing_since,
        next_try=run.next_try,
        error=run.error,
    )


def job_facts(homes: HomePaths) -> JobFacts:
    """Return the functions by which the export reads a job's environment and goodput."""

    def environment(job_id: str, attempt: int) -> Mapping[str, str]:
        found = newest_environment(homes, job_id, attempt)
        facts = {} if found is None else found.model_dump(mode="json", exclude_none=True)
        return {key: str(value) for key, value in facts.items() if not isinstance(value, dict | list)}

    def goodput(session: Session, job: Job) -> Mapping[str, float]:
        figures = job_goodputs(session, [job])[job.id].model_dump(exclude_none=True)
        return figures | {"attempts": job.attempt, "preemptions": job.preemptions, "failures": job.failures}

    return JobFacts(homes, environment, goodput)
