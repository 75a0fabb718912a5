"""Creates the rows of an attempt that is on the disk and not in the database, as after a backup was restored. Their event
``agent-killed`` makes a reconciler kill and finish it."""

from __future__ import annotations

import json
import secrets
import shlex
from dataclasses import fields
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event, EventType
from ratchet_contract.spec.job import JobSpec
from ratchet_service.checkpoints.run_directory_scan import launched_at
from ratchet_service.db.api_tokens import hash_token
from ratchet_service.db.clock import now_in
from ratchet_service.db.leases import Lease
from ratchet_service.db.models import RECOVERED_FROM_DISK, Attempt, AttemptNode, Job
from ratchet_service.db.transitions import add_event, apply
from ratchet_service.launchers.base import attempt_name
from ratchet_service.launchers.launch_file import read_launch_file


def create_adopted_attempt(
    session: Session, home: HomePaths, job: Job, spec: JobSpec, number: int, lease_columns: dict[str, Any]
) -> Lease:
    """Create the rows of attempt ``number``, make its queued and locked job active, and return the job's new lease, whose
    columns are ``lease_columns``."""
    paths, now = home.job(job.id).attempt(number), now_in(session)
    written = read_launch_file(paths)
    plan: dict[str, Any] = {"name": attempt_name(job.id, number), RECOVERED_FROM_DISK: True}
    token = secrets.token_urlsafe(32)
    text = f"attempt {number} is on the disk, but not in the database: a backup was restored. It is ended and recorded"
    nodes = spec.world.nodes
    if written is not None:
        nodes = written.spec.world.nodes
        plan["launch_file"] = written.model_dump(mode="json", exclude={"report_token", "spec"})
        token = written.report_token
        changed = [key for key in ("world", "hook") if getattr(written.spec, key) != getattr(spec, key)]
        if changed:
            world, hook = written.spec.world, _hook_options(written.spec, spec)
            text += (
                f". It had another {' and another '.join(changed)} than the job has now: `ratchet suspend {job.id}`, then "
                f"`ratchet resume {job.id} --world {world.ranks_per_node} --nodes {world.nodes} --hook {hook}`"
            )
    session.add(
        Attempt(
            job_id=job.id,
            number=number,
            report_token_hash=hash_token(token),
            launch=plan,
            created_at=max(job.created_at, launched_at(paths, now)),
        )
    )
    session.flush()
    # no slots: this reconciler ended all processes of unknown attempts when it started
    for node in range(nodes):
        session.add(AttemptNode(job_id=job.id, attempt=number, node=node, gpus=[], cpu_slots=[]))
    values: dict[str, Any] = {"attempt": number, "not_before": None, "checkpoint_request": 0, **lease_columns}
    if job.started_at is None:
        values["started_at"] = now
    apply(
        session, job.id, Event.LAUNCH, message=None, values=values, data={"attempt": number, RECOVERED_FROM_DISK: True}
    )
    add_event(session, job.id, EventType.ATTEMPT_FOUND, text, attempt=number, data={"attempt": number})
    add_event(session, job.id, EventType.AGENT_KILLED, text, attempt=number)
    return Lease(job.id, number, lease_columns["lease_token"])


def _hook_options(old: JobSpec, new: JobSpec) -> str:
    """Return the arguments after ``--hook`` with which ``ratchet resume`` changes a job's hook from that of ``new`` to that of
    ``old``."""
    has = new.hook.values() if old.hook.name == new.hook.name else {f.name: f.default for f in fields(old.hook)}
    wanted = {key: value for key, value in old.hook.values().items() if has[key] != value and key != "name"}
    options = (f"--set {shlex.quote(f'hook.{key}={json.dumps(value)}')}" for key, value in wanted.items())
    return " ".join((old.hook.name, *options))
