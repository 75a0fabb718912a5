"""Prepares other ranks, another hook or other code for a job: computes the changed spec and checks whether a checkpoint can be
carried over. No row is changed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api.requests import ResumeRequest
from ratchet_contract.api.views import Warning_
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.errors import CheckpointError, FieldProblem, SpecError
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.phases import EventType
from ratchet_contract.plural import pluralize
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_hooks.specs.compatibility import hook_change, recorded_spec
from ratchet_hooks.specs.registry import is_stateful
from ratchet_service.checkpoints.lineage import committed_in_lineage, fork_of
from ratchet_service.db.models import Job
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.json_merge_patch import merge
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases import submit
from ratchet_service.usecases.spec_patch import complete_hook_patch
from ratchet_store.format.manifest_file import read_manifest


@dataclass(frozen=True)
class Change:
    """A change of a job. ``spec``: the job's spec after the change. ``columns``: new values for columns of the job's row.
    ``events``: type, message and data of each event for the job's history."""

    spec: JobSpec
    columns: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[EventType, str, dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class NewCode:
    """The code that a resume requests. ``digest``: the digest of its snapshot. ``git``: its Git facts; None: no repository is
    known. ``warnings``: all warnings about the job's spec with this code."""

    digest: str
    git: GitFacts | None
    warnings: list[Warning_]

    @property
    def hook_warnings(self) -> list[Warning_]:
        """Return those warnings in ``warnings`` that are about the hook."""
        return [w for w in self.warnings if _is_hook_warning(w.pointer, w.code)]

    def is_new(self, job: Job) -> bool:
        """Return True if this code differs from the job's present code."""
        return self.digest != job.resolved.get("code_digest")


def requested_spec(job: Job, request: ResumeRequest, code: NewCode | None = None) -> JobSpec | None:
    """Return the job's spec with the changes that ``request`` requests, or None if nothing changes. ``code``: the requested
    code, whose snapshot exists; None if there is no snapshot yet or no code is requested. Raise ``SpecError``."""
    spec = JobSpec.model_validate(job.spec)
    patch: dict[str, Any] = {}
    if request.code is not None and (code is None or code.is_new(job)):
        patch["code"] = request.code.model_dump(exclude={"include"} if request.code.include is None else None)
    if code is not None and (code.is_new(job) or code.git is not None):
        patch["code"] = patch.get("code", {}) | {"git": code.git and code.git.model_dump()}
    if request.world is not None:
        patch["world"] = request.world.model_dump(exclude_none=True)
    if request.on_hook_mismatch is not None:
        patch["policy"] = {"on_hook_mismatch": request.on_hook_mismatch}
    if request.hook is not None:
        patch |= complete_hook_patch(job.spec["hook"], {"hook": request.hook})
    data = merge(job.spec, patch)
    changed = parse_spec(data) if {"world", "hook"} & set(patch) else JobSpec.model_validate(data)
    return None if changed == spec else changed


def prepare_code(job: Job, spec: JobSpec | None, submission: LocalSubmission) -> NewCode:
    """Check a spec, and take a snapshot of the code that it names. ``spec``: the changed spec; None: the job's present spec.
    This may run user code, so never call it within a transaction. Raises as ``submit.prepare`` does, and ``SpecError`` if the
    job runs without a snapshot of code."""
    before = JobSpec.model_validate(job.spec)
    if before.snapshot_code is None:
        text = (
            "the job was submitted without code of its own: submit a new job with code"
            if before.code is None
            else "the job runs the directory of its nodes (code.source nodes): change it there, and resume without code"
        )
        raise SpecError(f"/code: {text}", errors=[FieldProblem(pointer="/code", code="no-snapshot", detail=text)])
    data = dict(job.spec) if spec is None else spec.model_dump(mode="json")
    data.pop("start_from", None)  # its copy exists and is not checked again
    prepared = submit.prepare(data, submission)
    assert prepared.resolved.code_digest is not None and prepared.spec.code is not None
    return NewCode(prepared.resolved.code_digest, prepared.spec.code.git, prepared.warnings)


def check_hook(job: Job, spec: JobSpec | None, submission: LocalSubmission) -> list[Warning_]:
    """Check the hook of ``spec`` if it differs from the job's hook, and return the warnings about it. ``spec``: the changed
    spec; None: no change, so nothing is checked. This may run user code, so never call it within a transaction. Raise
    ``SpecError`` for a hook that the job cannot run, or ``Refused``."""
    if spec is None or spec.hook == JobSpec.model_validate(job.spec).hook:
        return []
    warnings, problems = submission.check_hook_change(spec, Resolved.model_validate(job.resolved))
    if problems:
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", errors=problems)
    return [w for w in warnings if _is_hook_warning(w.pointer, w.code)]


def _is_hook_warning(pointer: str, code: str) -> bool:
    """Return True if a warning with this pointer and code is about the hook."""
    return pointer == "/hook" or pointer.startswith("/hook/") or code.startswith("hook-")


def make_change(
    job: Job,
    spec: JobSpec,
    submission: LocalSubmission,
    hook_warnings: Sequence[Warning_] = (),
    code: NewCode | None = None,
) -> Change:
    """Return the ``Change`` that gives the job ``spec``; nothing is stored. ``hook_warnings``: the warnings about a changed
    hook, used only if ``code`` is None. ``code``: the new code; None: the code stays. Raise ``SpecError``."""
    old, resolved = JobSpec.model_validate(job.spec), Resolved.model_validate(job.resolved)
    out = Change(spec, {"spec": spec.model_dump(mode="json"), "spec_digest": spec.digest()})
    warnings = [Warning_.model_validate(w) for w in job.warnings]
    if code is not None:
        warnings, before_code = code.warnings, resolved.code_digest
        resolved = resolved.model_copy(update={"code_digest": code.digest})
        out.columns["resolved"] = resolved.model_dump(mode="json")
        text = f"code: {before_code} -> {code.digest}"
        out.events.append((EventType.CODE_CHANGED, text, {"code_digest": _pair(before_code, code.digest)}))
    if spec.hook != old.hook:
        if code is None:  # otherwise ``code.warnings`` already includes the new hook's
            warnings = [w for w in warnings if not _is_hook_warning(w.pointer, w.code)] + [*hook_warnings]
        before, after = (hook.values() for hook in (old.hook, spec.hook))
        change = hook_change(old.hook.name, before, spec.hook)
        text = change.description if change is not None else "hook: parameters without effect on the results"
        out.events.append((EventType.HOOK_CHANGED, text, {"hook": _pair(before, after)}))
    if spec.world != old.world:
        resized, warnings, problems = submission.resize(spec, resolved, warnings)
        if problems:
            raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", errors=problems)
        out.columns["resolved"] = resized.model_dump(mode="json")
        out.events.append(_world_event(old, spec, resolved, resized))
    out.columns["warnings"] = [w.model_dump(mode="json") for w in warnings]
    policies = (old.policy.on_hook_mismatch, spec.policy.on_hook_mismatch)
    if policies[0] != policies[1]:
        text = f"policy.on_hook_mismatch: {policies[0]} -> {policies[1]}"
        out.events.append((EventType.POLICY_CHANGED, text, {"on_hook_mismatch": _pair(*policies)}))
    return out


def _world_event(
    old: JobSpec, spec: JobSpec, old_resolved: Resolved, resolved: Resolved
) -> tuple[EventType, str, dict[str, Any]]:
    """Return type, message and data of the event for another number of nodes or ranks."""
    nodes = (old.world.nodes, spec.world.nodes)
    ranks = (old.world.ranks_per_node, spec.world.ranks_per_node)
    threads = (old_resolved.threads_per_rank, resolved.threads_per_rank)
    text = f"{ranks[0]} -> {pluralize(ranks[1], 'rank')} per node"
    if nodes[0] != nodes[1]:
        text = f"{nodes[0]} -> {pluralize(nodes[1], 'node')}, {text}"
    if threads[0] != threads[1]:
        text += f", {threads[0]} -> {pluralize(threads[1], 'thread')} per rank"
    return (
        EventType.WORLD_CHANGED,
        text,
        {"nodes": _pair(*nodes), "ranks_per_node": _pair(*ranks), "threads_per_rank": _pair(*threads)},
    )


def _pair(old: Any, new: Any) -> dict[str, Any]:
    return {"old": old, "new": new}


def next_start(session: Session, job: Job, source: dict[str, int] | None, homes: HomePaths) -> Path | None:
    """Return the directory of the checkpoint that the job's next attempt is expected to start from; None if no checkpoint is
    expected. ``source``: step and attempt of a requested checkpoint, which is then the result."""
    if source is not None:
        return homes.job(job.id).checkpoint(source["step"], source["attempt"])
    committed = committed_in_lineage(session, job)
    if committed:
        return homes.job(job.id).checkpoint(committed[0].step, committed[0].attempt)
    fork = fork_of(job)
    return None if fork is None else JobPaths(Path(fork.job_root)).checkpoint(fork.step, fork.attempt)


def mismatches(spec: JobSpec, checkpoint: Path, code_digest: str | None) -> list[FieldProblem]:
    """Return the reasons why ranks with ``spec`` may not start from a checkpoint, such as another hook. The list is empty if
    no reason is known, or if the manifest cannot be read. ``checkpoint``: the checkpoint's directory. ``code_digest``: the
    digest of the job's code; None: the code is not compared."""
    try:
        with as_owner(checkpoint):
            manifest = read_manifest(checkpoint)
    # the attempt reports that, and may find another checkpoint
    except (CheckpointError, OSError):
        return []
    return manifest_mismatches(spec, manifest, code_digest)


def manifest_mismatches(
    spec: JobSpec, manifest: Manifest, code_digest: str | None, advice: str = "fork the job with determinism: warn"
) -> list[FieldProblem]:
    """Return why ranks with ``spec`` may not start from this checkpoint. ``code_digest``: as in ``mismatches``; ``advice``: what
    to do if determinism is strict."""
    out = []
    if reason := _rank_mismatch(spec, manifest, advice):
        out.append(FieldProblem(pointer="/world/ranks_per_node", code="world-size-mismatch", detail=reason))
    codes = (manifest.code_digest, code_digest)
    if spec.determinism == "strict" and None not in codes and codes[0] != codes[1]:
        detail = (
            f"checkpoint {manifest.id} was made by other code ({codes[0]} -> {codes[1]}): such a resume is never exact, and "
            f"determinism is strict; {advice}"
        )
        out.append(FieldProblem(pointer="/code", code="code-mismatch", detail=detail))
    changed = hook_change(manifest.hook.name, manifest.hook.parameters, spec.hook)
    if changed is not None:
        reason = changed.refusal(spec.policy.on_hook_mismatch)
        if spec.determinism == "strict":  # the policy cannot permit it
            reason = f"{changed.description}: such a resume is never exact, and determinism is strict; {advice}"
        if reason is not None:
            detail = f"checkpoint {manifest.id} was made with another hook. {reason}"
            out.append(FieldProblem(pointer="/hook", code="hook-mismatch", detail=detail))
    return out


def _rank_mismatch(spec: JobSpec, manifest: Manifest, advice: str) -> str | None:
    """Return why ranks with ``spec`` may not start from a checkpoint of another number of ranks; None: they may."""
    ranks = manifest.world_size
    if ranks == spec.world.size:
        return None
    again = pluralize(ranks, "rank")
    written = f"checkpoint {manifest.id} was written by {again}, the job asks for {spec.world.size}"
    if spec.determinism == "strict":
        return f"{written}: such a resume is never exact, and determinism is strict; keep {again}, or {advice}"
    if spec.policy.on_hook_mismatch != "fail":
        return None
    recorded = recorded_spec({**manifest.hook.parameters, "name": manifest.hook.name})
    lost = []
    if recorded is None or is_stateful(recorded):
        lost.append(f"the state of {manifest.hook.name} is per rank")
    if manifest.replicas != "equal":
        lost.append("the ranks' parameters differ")
    if not lost:
        return None
    return (
        f"{written}, and {' and '.join(lost)}: set on_hook_mismatch to redistribute (residuals, and parameters that differ, "
        f"become their mean) or reset (the hook starts from its initial state), or keep {again}"
    )
