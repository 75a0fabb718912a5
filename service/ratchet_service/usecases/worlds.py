"""Another number of ranks for a job: the changed spec, decided for this machine, and whether a checkpoint can be carried over.

What the first attempt would refuse for a reason that is known now is refused now. Whether the user's data can go on with
another number of ranks is only known to the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api import ResumeRequest, Warning_
from ratchet_contract.errors import CheckpointError, SpecError
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_hooks.registry import is_stateful
from ratchet_service.ancestry import fork_of
from ratchet_service.models import Job
from ratchet_service.ports import SubmissionPorts
from ratchet_service.usecases.queries import committed_in_lineage
from ratchet_store.commit import read_manifest


@dataclass(frozen=True)
class Change:
    """``spec`` is the job's from now on; ``columns`` go into its row, ``events`` (type, message, data) into its history."""

    spec: JobSpec
    columns: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)


def wanted(job: Job, request: ResumeRequest) -> JobSpec | None:
    """The job's spec with what the request asks for; None where that is what it is already."""
    spec = JobSpec.model_validate(job.spec)
    update: dict[str, Any] = {}
    if request.world is not None:
        update["world"] = spec.world.model_copy(update={"ranks_per_node": request.world.ranks_per_node})
    if request.on_hook_mismatch is not None:
        update["policy"] = spec.policy.model_copy(update={"on_hook_mismatch": request.on_hook_mismatch})
    changed = spec.model_copy(update=update)
    return None if changed == spec else changed


def change(job: Job, spec: JobSpec, ports: SubmissionPorts) -> Change:
    """What ``spec`` makes of the job. Raises ``SpecError`` where this machine cannot run so many ranks."""
    old = JobSpec.model_validate(job.spec)
    out = Change(spec, {"spec": spec.model_dump(mode="json"), "spec_digest": spec.digest()})
    if spec.world != old.world:
        before = Resolved.model_validate(job.resolved)
        warnings = [Warning_.model_validate(w) for w in job.warnings]
        resolved, warnings, problems = ports.resize(spec, before, warnings)
        if problems:
            raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", errors=problems)
        out.columns["resolved"] = resolved.model_dump(mode="json")
        out.columns["warnings"] = [w.model_dump(mode="json") for w in warnings]
        ranks = (old.world.ranks_per_node, spec.world.ranks_per_node)
        threads = (before.threads_per_rank, resolved.threads_per_rank)
        text = f"{ranks[0]} -> {ranks[1]} ranks per node"
        if threads[0] != threads[1]:
            text += f", {threads[0]} -> {threads[1]} threads per rank"
        data = {"ranks_per_node": _pair(*ranks), "threads_per_rank": _pair(*threads)}
        out.events.append(("world-changed", text, data))
    policies = (old.policy.on_hook_mismatch, spec.policy.on_hook_mismatch)
    if policies[0] != policies[1]:
        text = f"policy.on_hook_mismatch: {policies[0]} -> {policies[1]}"
        out.events.append(("policy-changed", text, {"on_hook_mismatch": _pair(*policies)}))
    return out


def _pair(old: Any, new: Any) -> dict[str, Any]:
    return {"old": old, "new": new}


def next_start(session: Session, job: Job, source: dict[str, int] | None, homes: HomePaths) -> Path | None:
    """Directory of the checkpoint that the job's next attempt starts from, if all goes well; None: from scratch. ``source``: the
    one that was asked for, as in the column ``resume_from``."""
    if source is not None:
        return homes.job(job.id).checkpoint(source["step"], source["epoch"])
    committed = committed_in_lineage(session, job)
    if committed:
        return homes.job(job.id).checkpoint(committed[0].step, committed[0].epoch)
    fork = fork_of(job)
    return None if fork is None else JobPaths(Path(fork.job_root)).checkpoint(fork.step, fork.epoch)


def mismatch(spec: JobSpec, checkpoint: Path) -> str | None:
    """Why a group of ``spec`` may not start from the checkpoint because another number of ranks wrote it, and what to do; None:
    it may. One that cannot be read now is left to the attempt, which may find another."""
    try:
        ranks = read_manifest(checkpoint).world_size
    except (CheckpointError, OSError):
        return None
    if ranks == spec.world.size:
        return None
    again = f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
    written = f"checkpoint {checkpoint.name} was written by {again}, the job asks for {spec.world.size}"
    if spec.determinism == "strict":
        return (
            f"{written}: that is never exact, and determinism is strict; keep {again}, or fork the job with determinism: "
            "warn"
        )
    if is_stateful(spec.hook) and spec.policy.on_hook_mismatch == "fail":
        return (
            f"{written}, and the residuals of {spec.hook.name} are per rank: set on_hook_mismatch to redistribute (every rank "
            f"gets their mean) or reset (the hook starts anew), or keep {again}"
        )
    return None
