"""Prepares and stores a new job that starts from a checkpoint of another job; the request can change its spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.requests import ForkRequest
from ratchet_contract.errors import Conflict, FieldProblem, NotFound, SpecError
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event, EventType
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import ForkSource
from ratchet_contract.spec.job import JobSpec, StartSpec
from ratchet_service.checkpoints import object_store
from ratchet_service.checkpoints.lineage import committed_in_lineage
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Checkpoint, Job
from ratchet_service.db.queries import find_checkpoint, find_job, find_job_for_update
from ratchet_service.db.transitions import add_event, check_transition
from ratchet_service.json_merge_patch import merge
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases import resize, submit
from ratchet_service.usecases.checkpoints import set_pin
from ratchet_service.usecases.spec_patch import complete_code_patch, complete_hook_patch, complete_launcher_patch
from ratchet_service.usecases.views import labels_of


@dataclass(frozen=True)
class PreparedFork:
    """A checked fork. ``prepared``: the new job's spec; ``parent_id``: the job that owns the source checkpoint
    ``checkpoint_id``."""

    prepared: submit.Prepared
    parent_id: str
    checkpoint_id: str


def prepare(
    database: Database, job_id: str, request: ForkRequest, submission: LocalSubmission, homes: HomePaths
) -> PreparedFork:
    """Return the new job's spec, checked as at submission, and its source checkpoint, for ``store``. The request's spec is merged
    over that of job ``job_id``. If the request names ``code``, a new snapshot may be taken. A source only in the object store is
    fetched.

    Raise as ``submit.prepare`` does, and ``NotFound``, ``Conflict`` or ``CheckpointError``.
    """
    with database.read() as session:
        parent = find_job(session, job_id)
        source = _source_checkpoint(session, parent, request.checkpoint_id)
        origin = find_job(session, source.job_id)
        earlier = [row.name for row in committed_in_lineage(session, origin) if row.step < source.step]
        labels = labels_of(session, [job_id])[job_id]
    base = parent.spec | {"labels": labels, "priority": parent.priority}
    change = complete_code_patch(complete_hook_patch(parent.spec["hook"], request.spec))
    data = merge(base, complete_launcher_patch(parent.spec["launcher"], change))
    if not isinstance(data, dict):
        raise SpecError("/spec: a mapping is merged over the parent's spec", code="invalid-body")
    data["name"] = request.name or request.spec.get("name") or _fork_name(parent.name)
    digest = None if "code" in request.spec else parent.resolved.get("code_digest")
    start = _pop_start_from(data, request)
    try:
        prepared = submit.prepare(data, submission, code_digest=digest)
    except SpecError as error:
        raise _with_request_pointers(error, named=request.name is not None) from None
    prepared = replace(prepared, spec=prepared.spec.model_copy(update={"start_from": start}))
    if _has_no_steps_left(prepared, origin, source):
        raise _no_steps_left_error(origin, source, earlier)
    checkpoint = homes.job(source.job_id).checkpoint(source.step, source.attempt)
    object_store.ensure_local(homes, origin, source)
    _require_loadable(prepared, checkpoint)
    return PreparedFork(prepared, origin.id, source.name)


_STEP_COUNT_KEYS = ("task", "script", "env", "secrets", "python", "image", "volumes", "world", "trial")
"""Keys of the spec, besides the code, whose change may change the number of steps."""


def _has_no_steps_left(prepared: submit.Prepared, origin: Job, source: Checkpoint) -> bool:
    """True if the checkpoint's job, ``origin``, has certainly done all the steps that this fork would do."""
    if not source.finished or origin.total_steps is None or source.step < origin.total_steps:
        return False
    spec, before = prepared.spec.model_dump(mode="json"), JobSpec.model_validate(origin.spec)
    nodes = before.code is not None and before.snapshot_code is None
    same_code = not nodes and prepared.resolved.code_digest == origin.resolved.get("code_digest")
    return same_code and all(
        spec[key] == value for key, value in before.model_dump(mode="json", include={*_STEP_COUNT_KEYS}).items()
    )


def _no_steps_left_error(origin: Job, source: Checkpoint, earlier: list[str]) -> Conflict:
    """Return, not raise, the error for a fork that would train no steps. ``earlier``: ids of earlier checkpoints, newest
    first."""
    more = (
        "increase its steps with --set of the option that its code reads (task.args, script; if its data have grown: any "
        "change of env)"
    )
    other = (
        f", or fork it from an earlier checkpoint: `ratchet fork {origin.id} --checkpoint {earlier[0]}`"
        if earlier
        else ""
    )
    all_ = pluralize(source.step, "step")
    text = f"checkpoint {source.name} has all {all_}, and a fork of it would train no further ones: {more}{other}"
    return Conflict(text, code="nothing-left")


def _pop_start_from(data: dict[str, Any], request: ForkRequest) -> StartSpec | None:
    """Remove ``start_from`` from the merged spec ``data`` and return it. It is the parent's value, which the new job's spec
    records. None: the parent has none, or the request sets null. Raise ``SpecError`` if the request sets a value."""
    start = data.pop("start_from", None)
    if request.spec.get("start_from") is None:
        return None if start is None else StartSpec.model_validate(start)
    text = "a fork starts from a checkpoint: remove start_from, or submit a separate job"
    problem = FieldProblem(pointer="/spec/start_from", code="fork-start", detail=text)
    raise SpecError(f"/spec/start_from: {text}", errors=[problem])


def store(session: Session, fork: PreparedFork, owner: str, homes: HomePaths) -> Job:
    """Store the new job, pin its source, and return the job's row. Raise ``NotFound`` or ``Conflict``, and as ``submit.store``
    does."""
    parent = find_job_for_update(session, fork.parent_id)
    check_transition(parent, Event.FORK)
    row = find_checkpoint(session, parent.id, fork.checkpoint_id)
    _require_committed(row)
    root = homes.job(parent.id).root
    source = ForkSource(job_root=str(root), step=row.step, attempt=row.attempt, digest=row.digest)
    origin = f"{parent.id}/{row.name}"
    job = submit.store(
        session,
        fork.prepared,
        owner,
        pointer="/spec",
        action=AuditAction.FORK,
        source=origin,
        forked_from=origin,
        fork_source=source.model_dump(mode="json"),
        step=row.step,
        committed_step=row.step,
    )
    set_pin(session, row, True, homes)
    add_event(session, parent.id, EventType.FORKED, f"job {job.id} was forked from {row.name}", data={"fork": job.id})
    add_event(session, job.id, EventType.FORKED_FROM, f"starts from {origin}", data={"source": origin})
    session.flush()
    return job


def _with_request_pointers(error: SpecError, *, named: bool) -> SpecError:
    """Return a copy of ``error`` whose pointers refer to the request's body, where the spec is below ``/spec``. ``named``: the
    request itself names the new job, so the pointer ``/name`` stays as it is."""
    errors = [
        e if named and e.pointer == "/name" else e.model_copy(update={"pointer": f"/spec{e.pointer}"})
        for e in error.errors
    ]
    detail = f"{errors[0].pointer}: {errors[0].detail}" if errors else error.detail
    return SpecError(detail, code=error.code, errors=errors)


def _source_checkpoint(session: Session, parent: Job, checkpoint_id: str | None) -> Checkpoint:
    """Return the checkpoint that the new job starts from; ``checkpoint_id`` None: the newest of ``parent``'s lineage, else the
    one that ``parent`` was forked from. Raise ``NotFound`` if there is none, or ``Conflict``."""
    if checkpoint_id is not None:
        row = find_checkpoint(session, parent.id, checkpoint_id)
        _require_committed(row)
        return row
    committed = committed_in_lineage(session, parent)
    # a fork without a checkpoint of its own yet: what it starts from itself
    if not committed and parent.forked_from is not None:
        job_id, _, name = parent.forked_from.partition("/")
        row = find_checkpoint(session, job_id, name)
        _require_committed(row)
        return row
    if not committed:
        text = f"job {parent.id} has no committed checkpoint: there is nothing to fork from. "
        text += "A job with another spec is submitted"
        if JobSpec.model_validate(parent.spec).snapshot_code is not None:
            text += f"; with other code this one starts again by `ratchet resume {parent.id} --code DIR`"
        raise NotFound(text, code="checkpoint-not-found")
    return committed[0]


def _require_committed(row: Checkpoint) -> None:
    """Raise ``Conflict`` (``checkpoint-gone``) unless the checkpoint is committed."""
    if row.state != "committed":
        raise Conflict(f"checkpoint {row.name} is {row.state}: it cannot be started from", code="checkpoint-gone")


def _fork_name(name: str) -> str:
    """Return the name of a fork: that of its parent, cut to at most 58 characters, with "-fork" appended."""
    return name[:58].rstrip("-") + "-fork"


def _require_loadable(prepared: submit.Prepared, checkpoint: Path) -> None:
    """Raise ``SpecError`` if a job with the new spec may not start from the checkpoint."""
    found = resize.mismatches(prepared.spec, checkpoint, prepared.resolved.code_digest)
    problems = [p.model_copy(update={"pointer": f"/spec{p.pointer}"}) for p in found]
    if problems:
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", errors=problems)
