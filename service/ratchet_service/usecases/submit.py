"""Submits a job: parses its spec, checks the spec against the machine, takes a snapshot of the code, and stores the job. A dry
run stores nothing. Job ids sort by time of creation, to the millisecond."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.views import PlanView, Warning_
from ratchet_contract.phases import EventType, JobPhase
from ratchet_contract.spec.job import CodeSpec, JobSpec, Resolved
from ratchet_contract.spec.masking import masked_spec
from ratchet_contract.spec.parse import examine_spec, spec_error
from ratchet_service.db import audit
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Job, JobLabel
from ratchet_service.db.transitions import add_event
from ratchet_service.scheduling import quotas
from ratchet_service.submission.local_submission import LocalSubmission

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_EPOCH_MS: Final = 1_704_067_200_000  # 2024-01-01T00:00:00Z


def new_job_id() -> str:
    """Return a new job id, which encodes 45 bits of milliseconds since 2024 and 15 random bits."""
    number = ((time.time_ns() // 1_000_000 - _EPOCH_MS) << 15) | secrets.randbits(15)
    return "job-" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(55, -1, -5))


@dataclass(frozen=True)
class Prepared:
    """A checked spec. ``resolved``: what is decided from it, such as device, back end and code digest."""

    spec: JobSpec
    resolved: Resolved
    warnings: list[Warning_]


def check(data: Any, submission: LocalSubmission, code_digest: str | None = None) -> Prepared:
    """Check the spec ``data``, and decide every setting that is ``auto``. ``code_digest``: the digest of a snapshot of the
    code, which is checked instead of the code's directory. Raise ``SpecError`` with every problem found, ``Refused`` or
    ``OSError``."""
    found = examine_spec(data)
    spec = found.spec
    if spec is None:
        raise spec_error(found.problems, data)
    resolved, warnings, problems = submission.resolve(spec, code_digest or _uploaded_digest(spec), found.uncertain_keys)
    if found.problems or problems:
        raise spec_error([*found.problems, *problems], data)
    return Prepared(spec, resolved, warnings)


def prepare(data: Any, submission: LocalSubmission, *, code_digest: str | None = None) -> Prepared:
    """Check a spec as ``check`` does, and take snapshots of its code and of its ``start_from`` file, if it has them.
    ``code_digest``: the digest of an existing snapshot of the code, used instead of a new one. Raise ``SpecError``,
    ``Refused`` or ``OSError``."""
    checked = check(data, submission, code_digest)
    spec, copies = checked.spec, {}
    if spec.start_from is not None:
        copies["start_digest"] = submission.snapshot_file(Path(spec.start_from.path))
    if spec.code is not None and spec.code.source == "snapshot":
        copies["code_digest"] = digest = code_digest or _snapshot_digest(spec.code, submission)
        if code_digest is None and spec.code.digest is None:
            git = submission.git_facts(Path(spec.code.path), digest)
            spec = spec.model_copy(update={"code": spec.code.model_copy(update={"git": git})})
        spec = submission.with_requirements(spec, digest)
    return Prepared(spec, checked.resolved.model_copy(update=copies), checked.warnings)


def _uploaded_digest(spec: JobSpec) -> str | None:
    """Return the digest of uploaded code; None if the spec names a directory or no code."""
    return spec.code.digest if spec.code is not None else None


def _snapshot_digest(code: CodeSpec, submission: LocalSubmission) -> str:
    """Return the digest of a new snapshot of the code's directory, or of the uploaded code. Raise ``SpecError``, ``Refused`` or
    ``OSError``."""
    return (
        submission.snapshot(Path(code.path), code.include)
        if code.digest is None
        else submission.keep_uploaded(code.digest)
    )


def dry_run(data: Any, submission: LocalSubmission) -> PlanView:
    """Return what a submission of this spec would run, and the bytes of the hook's state per rank. Secret values are masked.
    Raises as ``check`` does."""
    checked = check(data, submission)
    resolved = checked.resolved.model_copy(update={"code_digest": _uploaded_digest(checked.spec)})
    return PlanView(
        spec=masked_spec(checked.spec.model_dump(mode="json")),
        resolved=resolved,
        warnings=checked.warnings,
        launch=submission.plan(checked.spec, resolved),
        hook_memory_bytes=submission.hook_memory(checked.spec, resolved),
    )


def store(
    session: Session,
    prepared: Prepared,
    owner: str,
    *,
    pointer: str = "",
    job_id: str | None = None,
    action: AuditAction = AuditAction.SUBMIT,
    source: str | None = None,
    **columns: Any,
) -> Job:
    """Store a new job, that is its row, its labels and its first event, and return the row. ``pointer``: JSON pointer to the
    spec in the request's body. ``job_id``: the job's id; if it is None or taken, a new id is made. ``action``, ``source``: what
    the audit log records; the source of a fork or an adoption. ``columns``: further columns of the row. Raise ``Conflict`` or
    ``SpecError`` if the owner's quota does not permit the job."""
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
    add_event(session, job_id, EventType.SUBMITTED, f"job {spec.name} submitted", data=facts)
    made = {"name": spec.name, "spec_digest": job.spec_digest} | ({} if source is None else {"source": source})
    audit.record(session, action, "job", job_id, owner, made)
    session.flush()
    return job


def label_rows(job: Job, labels: Mapping[str, str]) -> list[JobLabel]:
    """Return a job's labels as rows, not yet added to a session."""
    return [JobLabel(job_id=job.id, key=key, value=value, created_at=job.created_at) for key, value in labels.items()]
