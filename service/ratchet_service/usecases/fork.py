"""A new job from a checkpoint of another one, with a changed spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api_requests import ForkRequest
from ratchet_contract.errors import Conflict, FieldProblem, NotFound, SpecError
from ratchet_contract.messages import ForkSource
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event
from ratchet_contract.plural import counted
from ratchet_contract.spec import JobSpec, StartSpec
from ratchet_service import object_store
from ratchet_service.database import Database
from ratchet_service.merge_patch import merge
from ratchet_service.models import Checkpoint, Job
from ratchet_service.ports import SubmissionPorts
from ratchet_service.transitions import add_event, check
from ratchet_service.usecases import submit, worlds
from ratchet_service.usecases.checkpoints import set_pin
from ratchet_service.usecases.patching import whole_code, whole_hook, whole_launcher
from ratchet_service.usecases.queries import committed_in_lineage, find_checkpoint, find_job, hold_job
from ratchet_service.usecases.views import labels_of


@dataclass(frozen=True)
class PreparedFork:
    prepared: submit.Prepared
    parent_id: str
    checkpoint_id: str


def prepare(
    database: Database, job_id: str, request: ForkRequest, ports: SubmissionPorts, homes: HomePaths
) -> PreparedFork:
    """The new job's spec, checked as at submission; no transaction is open meanwhile. Raises ``SpecError``, ``NotFound``,
    ``Conflict``.

    The parent's snapshot of the code is used again, unless the request names ``code``: then a new one is taken.
    """
    with database.read() as session:
        parent = find_job(session, job_id)
        source = _source(session, parent, request.checkpoint_id)
        origin = find_job(session, source.job_id)
        earlier = [row.name for row in committed_in_lineage(session, origin) if row.step < source.step]
        labels = labels_of(session, [job_id])[job_id]
    base = parent.spec | {"labels": labels, "priority": parent.priority}
    change = whole_code(whole_hook(parent.spec["hook"], request.spec))
    data = merge(base, whole_launcher(parent.spec["launcher"], change))
    if not isinstance(data, dict):
        raise SpecError("/spec: a mapping is merged over the parent's spec", code="invalid-body")
    data["name"] = request.name or request.spec.get("name") or _fork_name(parent.name)
    digest = None if "code" in request.spec else parent.resolved.get("code_digest")
    start = _without_start(data, request)
    try:
        prepared = submit.prepare(data, ports, code_digest=digest)
    except SpecError as error:
        raise _in_request(error, named=request.name is not None) from None
    prepared = replace(prepared, spec=prepared.spec.model_copy(update={"start_from": start}))
    if _nothing_left(prepared, origin, source):
        raise _pointless(origin, source, earlier)
    checkpoint = homes.job(source.job_id).checkpoint(source.step, source.epoch)
    object_store.provide(homes, origin, source)
    _require_loadable(prepared, checkpoint)
    return PreparedFork(prepared, origin.id, source.name)


_STEPS_HANG_ON = ("task", "script", "env", "secrets", "python", "image", "volumes", "world", "trial")
"""Keys of the spec that may change how many steps there are, beside the code."""


def _nothing_left(prepared: submit.Prepared, origin: Job, source: Checkpoint) -> bool:
    """Has the job of the checkpoint done all the steps that this fork would have? False where that is not certain."""
    if not source.finished or origin.total_steps is None or source.step < origin.total_steps:
        return False
    spec, before = prepared.spec.model_dump(mode="json"), JobSpec.model_validate(origin.spec)
    nodes = before.code is not None and before.own_code is None
    same_code = not nodes and prepared.resolved.code_digest == origin.resolved.get("code_digest")
    return same_code and all(
        spec[key] == value for key, value in before.model_dump(mode="json", include={*_STEPS_HANG_ON}).items()
    )


def _pointless(origin: Job, source: Checkpoint, earlier: list[str]) -> Conflict:
    more = (
        "give it more steps, by --set of what its code takes them from (task.args, script; where its data have grown: any change "
        "of env)"
    )
    other = (
        f", or fork it from an earlier checkpoint: `ratchet fork {origin.id} --checkpoint {earlier[0]}`"
        if earlier
        else ""
    )
    all_ = counted(source.step, "step")
    text = f"checkpoint {source.name} has all {all_}, and a fork of it would have no others: {more}{other}"
    return Conflict(text, code="nothing-left")


def _without_start(data: dict[str, Any], request: ForkRequest) -> StartSpec | None:
    """What the parent started from stays in the spec as history: its file is neither looked at nor copied. Raises ``SpecError``
    for another one."""
    start = data.pop("start_from", None)
    if request.spec.get("start_from") is None:
        return None if start is None else StartSpec.model_validate(start)
    text = "a fork starts from a checkpoint: leave start_from out, or submit a job of its own"
    problem = FieldProblem(pointer="/spec/start_from", code="fork-start", detail=text)
    raise SpecError(f"/spec/start_from: {text}", errors=[problem])


def store(session: Session, fork: PreparedFork, owner: str, homes: HomePaths) -> Job:
    """The new job's row. The source is pinned, so that nobody's retention takes it away before the fork has started."""
    parent = hold_job(session, fork.parent_id)
    check(parent, Event.FORK)
    row = find_checkpoint(session, parent.id, fork.checkpoint_id)
    _require_committed(row)
    root = homes.job(parent.id).root
    source = ForkSource(job_root=str(root), step=row.step, epoch=row.epoch, digest=row.digest)
    origin = f"{parent.id}/{row.name}"
    job = submit.store(
        session,
        fork.prepared,
        owner,
        pointer="/spec",
        forked_from=origin,
        fork_source=source.model_dump(mode="json"),
        step=row.step,
        committed_step=row.step,
    )
    set_pin(session, row, True, homes)
    add_event(session, parent.id, "forked", f"job {job.id} was forked from {row.name}", data={"fork": job.id})
    add_event(session, job.id, "forked-from", f"starts from {origin}", data={"source": origin})
    session.flush()
    return job


def _in_request(error: SpecError, *, named: bool) -> SpecError:
    """The same with pointers into the request's body, where the spec lies below ``/spec``."""
    errors = [
        e if named and e.pointer == "/name" else e.model_copy(update={"pointer": f"/spec{e.pointer}"})
        for e in error.errors
    ]
    detail = f"{errors[0].pointer}: {errors[0].detail}" if errors else error.detail
    return SpecError(detail, code=error.code, errors=errors)


def _source(session: Session, parent: Job, checkpoint_id: str | None) -> Checkpoint:
    """What the new job starts from: of a fork that has no checkpoint of its own yet, what that one starts from, another job's."""
    if checkpoint_id is not None:
        row = find_checkpoint(session, parent.id, checkpoint_id)
        _require_committed(row)
        return row
    committed = committed_in_lineage(session, parent)
    if not committed and parent.forked_from is not None:
        job_id, _, name = parent.forked_from.partition("/")
        row = find_checkpoint(session, job_id, name)
        _require_committed(row)
        return row
    if not committed:
        text = f"job {parent.id} has no committed checkpoint: there is nothing to fork from. "
        text += "A job with another spec is submitted"
        if JobSpec.model_validate(parent.spec).own_code is not None:
            text += f"; with other code this one starts again by `ratchet resume {parent.id} --code DIR`"
        raise NotFound(text, code="checkpoint-not-found")
    return committed[0]


def _require_committed(row: Checkpoint) -> None:
    if row.state != "committed":
        raise Conflict(f"checkpoint {row.name} is {row.state}: it cannot be started from", code="checkpoint-gone")


def _fork_name(name: str) -> str:
    return name[:58].rstrip("-") + "-fork"


def _require_loadable(prepared: submit.Prepared, checkpoint: Path) -> None:
    """What a checkpoint cannot be loaded into is refused now, not by the first attempt."""
    found = worlds.mismatches(prepared.spec, checkpoint, prepared.resolved.code_digest)
    problems = [p.model_copy(update={"pointer": f"/spec{p.pointer}"}) for p in found]
    if problems:
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", errors=problems)
