"""Reads from the rows of attempts what ``lifecycle.bad_nodes`` decides from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Attempt, AttemptNode, Job
from ratchet_service.lifecycle.bad_nodes import (
    FAULT_WINDOW,
    MIN_FAULTS,
    Exclusion,
    NodeFault,
    excluded_nodes,
    fault_kind,
)

_KNOWN_FOR: Final = timedelta(days=7)
"""A machine counts as known for this long after the start of an attempt on it."""
_MAX_ATTEMPTS: Final = 50
_MAX_JOBS: Final = 200
_ON_NODE: Final = (AttemptNode.job_id == Attempt.job_id) & (AttemptNode.attempt == Attempt.number)
_END: Final[tuple[Any, ...]] = (
    Attempt.number, AttemptNode.host, Attempt.ended_at, Attempt.cause, Attempt.rank, Attempt.exit_code, Attempt.message,
)  # fmt: skip


def exclusions(session: Session, job: Job, nodes: int) -> list[Exclusion]:
    """Return the nodes that the job's next attempt stays away from. ``nodes``: how many it needs."""
    if {"nodelist", "nodefile"} & (job.spec["launcher"].get("options") or {}).keys():
        return []  # the user has chosen nodes, and Slurm refuses a job that names a node and excludes it
    now = now_in(session)
    query = caused_ends(Attempt.job_id == job.id, Attempt.ended_at > now - FAULT_WINDOW)
    faults = [*faults_of(session, query.order_by(Attempt.number.desc()).limit(_MAX_ATTEMPTS))]
    return excluded_nodes(faults, _machines(session, job), nodes, now) if len(faults) >= MIN_FAULTS else []


def caused_ends(*conditions: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Return the query for ``faults_of``: the ends of attempts that a known node caused, under these conditions."""
    query = sa.select(*_END).join(AttemptNode, _ON_NODE & (AttemptNode.node == Attempt.node))
    return query.where(AttemptNode.host.is_not(None), *conditions)


def faults_of(session: Session, query: sa.Select[Any]) -> Iterator[NodeFault]:
    """Yield those of the ends that may be the hardware's."""
    for number, host, at, *end in session.execute(query):
        if (kind := fault_kind(*end)) is not None:
            yield NodeFault(number, host, at, kind)


def _machines(session: Session, job: Job) -> set[str]:
    """Return the hosts on which jobs with the same launcher settings and the same kind of GPU have run lately."""
    since = now_in(session) - _KNOWN_FOR
    place = (Job.spec["launcher"], Job.spec["resources"]["gpu"])
    jobs = sa.select(Job.id, *place).where(Job.attempt > 0, Job.updated_at > since).order_by(Job.updated_at.desc())
    mine = (job.spec["launcher"], job.spec["resources"]["gpu"])
    alike = [job_id for job_id, *other in session.execute(jobs.limit(_MAX_JOBS)) if tuple(other) == mine]
    hosts = sa.select(AttemptNode.host).join(Attempt, _ON_NODE).distinct()
    hosts = hosts.where(AttemptNode.job_id.in_([job.id, *alike]), Attempt.created_at > since)
    return {host for host in session.scalars(hosts) if host is not None}


def planned_exclusions(launch: Mapping[str, Any]) -> list[str]:
    """Return the nodes that an attempt stays away from. ``launch``: the launcher's plan, as stored."""
    return list(launch.get("launch_file", {}).get("exclude_nodes", ()))
