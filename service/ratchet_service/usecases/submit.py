"""Submission: parse, check against the machine, snapshot the code, store; and the dry run that stores nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api import PlanView, Warning_
from ratchet_contract.masking import masked_spec
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec import CodeSpec, JobSpec, Resolved
from ratchet_contract.spec_parse import examine_spec, refusal
from ratchet_service import quotas
from ratchet_service.clock import now_in
from ratchet_service.ids import new_job_id
from ratchet_service.models import Job, JobLabel
from ratchet_service.ports import SubmissionPorts
from ratchet_service.transitions import add_event


@dataclass(frozen=True)
class Prepared:
    """A spec that this machine can run, with everything decided that is decided once per job."""

    spec: JobSpec
    resolved: Resolved
    warnings: list[Warning_]


def check(data: Any, ports: SubmissionPorts, code_digest: str | None = None) -> Prepared:
    """Validate and resolve. Raises ``SpecError`` with every problem found."""
    found = examine_spec(data)
    spec = found.spec
    if spec is None:
        raise refusal(found.problems, data)
    resolved, warnings, problems = ports.resolve(spec, code_digest or _sent(spec), found.unsure)
    if found.problems or problems:
        raise refusal([*found.problems, *problems], data)
    return Prepared(spec, resolved, warnings)


def prepare(data: Any, ports: SubmissionPorts, *, code_digest: str | None = None) -> Prepared:
    """``check``, then the snapshots of the code and of the file to start from.

    ``code_digest``: a snapshot of the code that is there already, of a parent job, whose spec tells its commit.
    """
    checked = check(data, ports, code_digest)
    spec, copies = checked.spec, {}
    if spec.start_from is not None:
        copies["start_digest"] = ports.snapshot_file(Path(spec.start_from.path))
    if spec.code is not None and spec.code.source == "snapshot":
        copies["code_digest"] = digest = code_digest or _copied(spec.code, ports)
        if code_digest is None and spec.code.digest is None:
            git = ports.git_facts(Path(spec.code.path), digest)
            spec = spec.model_copy(update={"code": spec.code.model_copy(update={"git": git})})
    return Prepared(spec, checked.resolved.model_copy(update=copies), checked.warnings)


def _sent(spec: JobSpec) -> str | None:
    """The digest of code that a client has sent before the spec."""
    return spec.code.digest if spec.code is not None else None


def _copied(code: CodeSpec, ports: SubmissionPorts) -> str:
    return ports.snapshot(Path(code.path), code.include) if code.digest is None else ports.uploaded(code.digest)


def dry_run(data: Any, ports: SubmissionPorts) -> PlanView:
    """What would be run; nothing is stored, the code not copied."""
    checked = check(data, ports)
    resolved = checked.resolved.model_copy(update={"code_digest": _sent(checked.spec)})
    return PlanView(
        spec=masked_spec(checked.spec.model_dump(mode="json")),
        resolved=resolved,
        warnings=checked.warnings,
        launch=ports.plan(checked.spec, resolved),
        hook_memory_bytes=ports.hook_memory(checked.spec, resolved),
    )


def store(
    session: Session, prepared: Prepared, owner: str, *, pointer: str = "", job_id: str | None = None, **columns: Any
) -> Job:
    """The job's row, labels and first event. ``columns`` are further columns of the row (a fork's origin); ``pointer``: where the
    spec lies in the body; ``job_id``: one that ``new_job_id`` gave, whose directory there is already. Raises ``Conflict`` or
    ``SpecError`` (``quota-exceeded``)."""
    spec, now = prepared.spec, now_in(session)
    quotas.admit(session, owner, spec, prepared.resolved, pointer=pointer)
    while job_id is None or session.get(Job, job_id) is not None:
        job_id = new_job_id()
    job = Job(
        id=job_id,
        name=spec.name,
        owner=owner,
        phase=JobPhase.QUEUED,
        spec=spec.model_dump(mode="json"),
        resolved=prepared.resolved.model_dump(mode="json"),
        warnings=[w.model_dump(mode="json") for w in prepared.warnings],
        spec_digest=spec.digest(),
        priority=spec.priority,
        ttl=spec.ttl,
        created_at=now,
        updated_at=now,
        **columns,
    )
    session.add(job)
    session.flush()
    session.add_all(label_rows(job, spec.labels))
    facts = {"name": spec.name, "hook": spec.hook.name, "world_size": spec.world.size}
    add_event(session, job_id, "submitted", f"job {spec.name} submitted", data=facts)
    session.flush()
    return job


def label_rows(job: Job, labels: Mapping[str, str]) -> list[JobLabel]:
    """A job's labels as rows, in lists by the job's own time of creation."""
    return [JobLabel(job_id=job.id, key=key, value=value, created_at=job.created_at) for key, value in labels.items()]
