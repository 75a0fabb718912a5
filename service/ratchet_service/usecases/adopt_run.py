"""Makes a new job that continues from the newest checkpoint of a run without a service (a Session under plain python or
torchrun)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.views import Warning_
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.code.tree import UNLIMITED, TreeError, list_entries, script_digest
from ratchet_contract.errors import CheckpointError, Conflict, FieldProblem, SpecError
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.phases import EventType
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import ForkSource
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.run_without_service import differing_leaves, standalone_spec, value_text
from ratchet_service.db.models import Job
from ratchet_service.db.transitions import add_event
from ratchet_service.job_files.delete_job import deleted_unless_stored
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.observability import disk_space
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases import resize, submit
from ratchet_service.usecases.submit import new_job_id
from ratchet_store.filesystem.durable_io import DAMAGED, MISSING, remove_tree
from ratchet_store.read.run_directory import RunDirectory

_POINTER = "/query/adopt"
_COMPARED_KEYS = ("script", "ddp", "determinism")
"""Keys of the spec in which a difference makes the resume inexact; hook and ranks have separate rules (``usecases.resize``)."""

_SETTINGS_SUFFIXES = frozenset({".yaml", ".yml", ".json", ".toml", ".ini", ".cfg"})


@dataclass(frozen=True)
class PreparedAdoption:
    """A checked submission with the copied checkpoint. ``job_id``: the new job's id, whose directory exists; ``source``: the
    copy."""

    prepared: submit.Prepared
    job_id: str
    source: ForkSource


def check(data: Any, directory: str, submission: LocalSubmission) -> list[Warning_]:
    """Check the spec ``data`` and the run in ``directory``; no job is made. Return the warnings about adopting the run. Raise as
    ``prepare`` does."""
    run = _open_run(directory, submission)
    with _locked_run(run, directory):
        return _compare(run, _newest_manifest(run, directory), submit.check(data, submission), directory)


def prepare(
    data: Any, directory: str, submission: LocalSubmission, homes: HomePaths, until_stored: ExitStack
) -> PreparedAdoption:
    """Check the spec ``data`` and take its snapshots as at submission. Then copy the run's newest checkpoint into the directory
    of a new job. The result is for ``store``. Raise as ``submit.prepare`` does, and ``Conflict`` or ``CheckpointError``.

    ``until_stored``: the caller closes it after the commit of ``store``. If a ``RatchetError`` or ``OSError`` closes it instead,
    it deletes the copy."""
    run, job_id = _open_run(directory, submission), new_job_id()
    with _locked_run(run, directory):
        manifest = _newest_manifest(run, directory)
        prepared = submit.prepare(data, submission)
        warnings = _compare(run, manifest, prepared, directory)
        job = homes.job(job_id)
        until_stored.enter_context(deleted_unless_stored(job))
        _copy_checkpoint(run, manifest, job.adopted, directory)
    prepared = replace(prepared, warnings=[*prepared.warnings, *warnings])
    source = ForkSource(job_root=str(job.adopted.root), adopted=directory, **manifest.base.model_dump())
    return PreparedAdoption(prepared, job_id, source)


def store(session: Session, adoption: PreparedAdoption, owner: str, homes: HomePaths) -> Job:
    """Store the new job and return its row; if this fails, remove the job's directory with the copied checkpoint. Raise as
    ``submit.store`` does."""
    source = adoption.source
    columns: dict[str, Any] = {
        "fork_source": source.model_dump(mode="json"),
        "step": source.step,
        "committed_step": source.step,
    }
    try:
        job = submit.store(
            session,
            adoption.prepared,
            owner,
            job_id=adoption.job_id,
            action=AuditAction.ADOPT,
            source=source.adopted,
            **columns,
        )
        text = f"continues from step {source.step} of the run without a service in {source.adopted}"
        add_event(session, job.id, EventType.ADOPTED, text, data={"directory": source.adopted, "step": source.step})
        session.flush()
    except BaseException:
        remove_tree(homes.job(adoption.job_id).root)
        raise
    return job


def _open_run(directory: str, submission: LocalSubmission) -> RunDirectory:
    """Return the run in ``directory``. Raise ``SpecError`` if the path is not allowed or is not a run's directory."""
    path = Path(directory)
    if not path.is_absolute():
        raise _directory_error("relative-path", f"{directory!r} must be an absolute path on the service's machine")
    real = Path(os.path.realpath(path))
    if not submission.allows_path(real):
        raise _directory_error(
            "path-not-allowed",
            f"{directory} is outside the directories of its machine that this service accepts (--code-root). Ask its "
            "administrator",
        )
    if not real.is_dir():
        raise _directory_error(
            "adopt-not-found",
            f"there is no directory {directory!r} on the service's machine. Copy a run of another machine there first, with "
            "its whole directory",
        )
    run = RunDirectory(JobPaths(real), lambda fd: submission.allows_path(Path(f"/proc/self/fd/{fd}").readlink()))
    if run.id() is None:
        raise _directory_error(
            "adopt-no-run",
            f"{directory} is not the directory of a run without a service: it has no readable {run.mark.name}. Name the "
            "directory that the script passes to Session() (default: ratchet-checkpoints)",
        )
    return run


@contextmanager
def _locked_run(run: RunDirectory, directory: str) -> Iterator[None]:
    """Hold the run's lock, if it has a lock file, within the block. Raise ``Conflict`` if a process trains there, ``SpecError``
    if the directory cannot be read."""
    with ExitStack() as stack:
        try:
            stack.enter_context(run.locked())
        except BlockingIOError:
            text = (
                f"a process trains with the checkpoints in {directory}: stop it (Ctrl-C, or SIGTERM), then adopt them"
            )
            raise Conflict(text, code="directory-in-use") from None
        except OSError as error:
            raise _unreadable_error(error, directory) from error
        yield


def _newest_manifest(run: RunDirectory, directory: str) -> Manifest:
    """Return the manifest of the run's newest checkpoint. Raise ``SpecError`` or ``CheckpointError`` if there is no usable
    one."""
    try:
        return run.newest_manifest()
    except CheckpointError as error:
        if error.code == MISSING:
            text = f"{directory} has no checkpoint yet: there is nothing to adopt. Submit the job without it"
            raise _directory_error("adopt-no-checkpoint", text) from None
        raise _damaged_error(error, directory) from None
    except OSError as error:
        raise _unreadable_error(error, directory) from error
    except ValueError as error:  # from ``lineage``
        text = f"{directory} was changed by something else: {error}. Restore it from a backup, or submit the job without it"
        raise _directory_error("adopt-damaged", text) from None


def _unreadable_error(error: OSError, directory: str) -> SpecError:
    """Return the error for a directory that the service cannot read; it is not raised."""
    return _directory_error("unreadable", f"{directory} cannot be read by the service: {error.strerror or error}")


def _damaged_error(error: CheckpointError, directory: str) -> SpecError | CheckpointError:
    """Return the ``SpecError`` for a damaged newest checkpoint; ``error`` itself if it reports another fault. Nothing is
    raised."""
    if error.code != DAMAGED:
        return error
    return _directory_error(
        "adopt-damaged",
        f"the newest checkpoint in {directory} is damaged: {error.detail}. An older one is not used automatically: move the "
        "damaged one away to adopt the one before it",
    )


def _compare(run: RunDirectory, manifest: Manifest, prepared: submit.Prepared, directory: str) -> list[Warning_]:
    """Return the warnings about the resume, such as differences that make it inexact. Raise ``SpecError`` if the resume is
    refused. Reasons are, for example, another seed, or an inexact resume with strict determinism. Raise ``Conflict`` if the job
    would certainly train no further steps."""
    spec, resolved = prepared.spec, prepared.resolved
    if spec.script is None:
        raise _spec_error(
            "/task", "adopt-needs-script", "a checkpoint of a Session can be continued only by a script with a Session"
        )
    if spec.start_from is not None:
        raise _spec_error("/start_from", "fork-start", "the job starts from a checkpoint of the run: remove start_from")
    if unmanaged_script.WARNING in {w.code for w in prepared.warnings}:
        raise _spec_error("/script", "adopt-unmanaged", f"{spec.script[0]} has no Session that could continue from it")
    problems = resize.manifest_mismatches(spec, manifest, None, "submit it with determinism: warn")
    launch = run.launch_file(manifest.attempt)
    found: list[tuple[str, str]] = []
    if launch is not None:
        before, now = (s.model_dump(mode="json") for s in (launch.spec, standalone_spec(spec, resolved.device)))
        seed = launch.spec.seed
        if seed != spec.seed:
            text = (
                f"{seed} in the run, {spec.seed} in this spec; the order of the data follows from it: set it to {seed}"
            )
            problems.append(FieldProblem(pointer="/seed", code="adopt-differs", detail=text))
        leaves = [leaf for key in _COMPARED_KEYS for leaf in differing_leaves(key, before[key], now[key])]
        found = [
            (path, f"{value_text(there)} in the run, {value_text(here)} in this spec") for path, there, here in leaves
        ]
        threads = launch.resolved.threads_per_rank
        if threads != resolved.threads_per_rank:
            now_has = resolved.threads_per_rank
            text = f"{pluralize(threads, 'thread')} per rank in the run, {now_has} in this job: set it to {threads}"
            found.append(("resources.cpus_per_rank", text))
    pointers = [(f"/{path.replace('.', '/')}", text) for path, text in found]
    if spec.determinism == "strict":
        text = "such a resume is never exact, and determinism is strict"
        problems += [FieldProblem(pointer=p, code="adopt-differs", detail=f"{told}; {text}") for p, told in pointers]
    if problems:
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", errors=problems)
    warnings = [
        Warning_(pointer=p, code="adopt-differs", detail=f"{told}; the resume is not exact") for p, told in pointers
    ]
    if manifest.finished:
        ended = f"the run in {directory} has ended with step {manifest.step}"
        if launch is not None and not found and _is_same_work(spec, manifest):
            text = (
                f"{ended}, and this job would train no further steps: raise the number of steps in the script's "
                "arguments, env or code"
            )
            raise Conflict(text, code="nothing-left")
        text = f"{ended}: a script with the same number of steps has nothing to do"
        warnings.append(Warning_(pointer=_POINTER, code="adopt-finished", detail=text))
    return warnings


def _is_same_work(spec: JobSpec, manifest: Manifest) -> bool:
    """True if the job would certainly do as many steps as the run. The caller has checked that the script's arguments are the
    same."""
    if (
        spec.snapshot_code is None
        or spec.snapshot_code.digest is not None
        or spec.script is None
        or spec.env
        or spec.secrets
        or spec.world.size != manifest.world_size
    ):
        return False
    root = Path(spec.snapshot_code.path)
    try:
        # a settings file may change the number of steps
        settings = any(entry.source.suffix in _SETTINGS_SUFFIXES for entry in list_entries(root, UNLIMITED))
        return not settings and manifest.code_digest == script_digest({"__main__": root / spec.script[0]})
    except (OSError, TreeError):
        return False


def _copy_checkpoint(run: RunDirectory, manifest: Manifest, target: JobPaths, directory: str) -> None:
    """Copy the checkpoint of ``manifest`` into ``target``. Raise ``SpecError``, ``Refused`` or ``CheckpointError``."""
    try:
        run.copy_checkpoint(manifest, target)
    except CheckpointError as error:
        copied, run_path = str(target.root), os.path.realpath(directory)
        raise _damaged_error(
            CheckpointError(error.detail.replace(copied, run_path), code=error.code), directory
        ) from error
    except OSError as error:
        if disk_space.is_disk_full_error(error, target.root.parent):
            what = f"the checkpoint of {directory} cannot be copied there, and the job was not stored"
            raise disk_space.disk_full_error(target.root.parent, what, manifest.size) from error
        raise _unreadable_error(error, directory) from error


def _directory_error(code: str, detail: str) -> SpecError:
    """Return the error for a faulty directory, with the pointer ``/query/adopt``; it is not raised."""
    return _spec_error(_POINTER, code, detail)


def _spec_error(pointer: str, code: str, detail: str) -> SpecError:
    """Return a ``SpecError`` with one problem; it is not raised."""
    return SpecError(f"{pointer}: {detail}", errors=[FieldProblem(pointer=pointer, code=code, detail=detail)])
