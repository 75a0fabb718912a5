"""A new job that goes on from the newest checkpoint of a run without a service (a Session under plain python or torchrun).

The checkpoint is copied into the job's own directory, and the job starts from it as a fork does from its source. The run's
directory stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api import Warning_
from ratchet_contract.code_tree import UNLIMITED, TreeError, entries, script_digest
from ratchet_contract.errors import CheckpointError, Conflict, FieldProblem, SpecError
from ratchet_contract.manifest import Manifest
from ratchet_contract.messages import ForkSource
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.plural import counted
from ratchet_contract.run_without_service import as_without_service, shown, unequal
from ratchet_contract.spec import JobSpec
from ratchet_service import disk, unmanaged
from ratchet_service.ids import new_job_id
from ratchet_service.models import Job
from ratchet_service.ports import SubmissionPorts
from ratchet_service.transitions import add_event
from ratchet_service.usecases import submit, worlds
from ratchet_store.files import DAMAGED, MISSING, remove_tree
from ratchet_store.run_directory import RunDirectory

_POINTER = "/query/adopt"
_COMPARED = ("script", "ddp", "determinism")
"""Keys of the spec in which a difference is never exact; another hook and other ranks have rules of their own (``worlds``)."""

_SETTINGS = frozenset({".yaml", ".yml", ".json", ".toml", ".ini", ".cfg"})


@dataclass(frozen=True)
class PreparedAdoption:
    prepared: submit.Prepared
    job_id: str
    source: ForkSource


def check(data: Any, directory: str, ports: SubmissionPorts) -> list[Warning_]:
    """What a submission that adopts the run in ``directory`` would warn of, beside its spec. Raises as ``prepare`` does."""
    run = _run(directory, ports)
    with _at_rest(run, directory):
        return _compared(run, _newest(run, directory), submit.check(data, ports), directory)


def prepare(data: Any, directory: str, ports: SubmissionPorts, homes: HomePaths) -> PreparedAdoption:
    """The spec, checked as at submission, and the run's newest checkpoint copied into the directory of the job that is to be.
    Raises ``SpecError``, ``Conflict`` (``directory-in-use``), ``Refused`` (``disk-full``)."""
    run, job_id = _run(directory, ports), new_job_id()
    with _at_rest(run, directory):
        manifest = _newest(run, directory)
        prepared = submit.prepare(data, ports)
        warnings = _compared(run, manifest, prepared, directory)
        job = homes.job(job_id)
        job.root.mkdir(mode=0o700, parents=True)
        try:
            _copy(run, manifest, job.adopted, directory)
        except BaseException:
            remove_tree(job.root)
            raise
    prepared = replace(prepared, warnings=[*prepared.warnings, *warnings])
    source = ForkSource(job_root=str(job.adopted.root), adopted=directory, **manifest.base.model_dump())
    return PreparedAdoption(prepared, job_id, source)


def store(session: Session, adoption: PreparedAdoption, owner: str, homes: HomePaths) -> Job:
    """The new job's row. Raises what ``submit.store`` does; the copy is gone then."""
    source = adoption.source
    columns: dict[str, Any] = {
        "fork_source": source.model_dump(mode="json"),
        "step": source.step,
        "committed_step": source.step,
    }
    try:
        job = submit.store(session, adoption.prepared, owner, job_id=adoption.job_id, **columns)
        text = f"goes on from step {source.step} of the run without a service in {source.adopted}"
        add_event(session, job.id, "adopted", text, data={"directory": source.adopted, "step": source.step})
        session.flush()
    except BaseException:
        remove_tree(homes.job(adoption.job_id).root)
        raise
    return job


def _run(directory: str, ports: SubmissionPorts) -> RunDirectory:
    path = Path(directory)
    if not path.is_absolute():
        raise _refused("relative-path", f"{directory!r} must be an absolute path on the service's machine")
    real = Path(os.path.realpath(path))
    if not ports.allows(real):
        raise _refused(
            "path-not-allowed",
            f"{directory} lies outside the directories of its machine that this service takes (--code-root). Ask who runs it",
        )
    if not real.is_dir():
        raise _refused(
            "adopt-not-found",
            f"there is no directory {directory!r} on the service's machine. A run of another machine is copied there first, with "
            "all that its directory holds",
        )
    run = RunDirectory(JobPaths(real), lambda fd: ports.allows(Path(f"/proc/self/fd/{fd}").readlink()))
    if run.id() is None:
        raise _refused(
            "adopt-no-run",
            f"{directory} is not the directory of a run without a service: it has no {run.mark.name} that can be read. Name what "
            "the script gives to Session(), ratchet-checkpoints unless it gives another",
        )
    return run


@contextmanager
def _at_rest(run: RunDirectory, directory: str) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(run.at_rest())
        except BlockingIOError:
            text = (
                f"a process trains with the checkpoints in {directory}: stop it (Ctrl-C, or SIGTERM), then adopt them"
            )
            raise Conflict(text, code="directory-in-use") from None
        except OSError as error:
            raise _unreadable(error, directory) from error
        yield


def _newest(run: RunDirectory, directory: str) -> Manifest:
    try:
        return run.newest()
    except CheckpointError as error:
        if error.code == MISSING:
            text = f"{directory} has no checkpoint yet: there is nothing to adopt. Submit the job without it"
            raise _refused("adopt-no-checkpoint", text) from None
        raise _damaged(error, directory) from None
    except OSError as error:
        raise _unreadable(error, directory) from error


def _unreadable(error: OSError, directory: str) -> SpecError:
    return _refused("unreadable", f"{directory} cannot be read by the service: {error.strerror or error}")


def _damaged(error: CheckpointError, directory: str) -> SpecError | CheckpointError:
    if error.code != DAMAGED:
        return error
    return _refused(
        "adopt-damaged",
        f"the newest checkpoint in {directory} is damaged: {error.detail}. Nothing older takes its place unasked: move it away "
        "to adopt the one before it",
    )


def _compared(run: RunDirectory, manifest: Manifest, prepared: submit.Prepared, directory: str) -> list[Warning_]:
    """In what the job is not the run's like, and goes on all the same. Raises ``SpecError``."""
    spec, resolved = prepared.spec, prepared.resolved
    if spec.script is None:
        raise _not_taken("/task", "adopt-needs-script", "what a Session has saved goes on in a script with a Session")
    if spec.start_from is not None:
        raise _not_taken(
            "/start_from", "fork-start", "the job starts from a checkpoint of the run: leave start_from out"
        )
    if unmanaged.WARNING in {w.code for w in prepared.warnings}:
        raise _not_taken("/script", "adopt-unmanaged", f"{spec.script[0]} has no Session that could go on from it")
    problems = worlds.against(spec, manifest, None, "submit it with determinism: warn")
    launch = run.launch(manifest.epoch)
    found: list[tuple[str, str]] = []
    if launch is not None:
        before, now = (s.model_dump(mode="json") for s in (launch.spec, as_without_service(spec, resolved.device)))
        seed = launch.spec.seed
        if seed != spec.seed:
            text = (
                f"{seed} in the run, {spec.seed} in this spec; the order of the data follows from it: set it to {seed}"
            )
            problems.append(FieldProblem(pointer="/seed", code="adopt-differs", detail=text))
        leaves = [leaf for key in _COMPARED for leaf in unequal(key, before[key], now[key])]
        found = [(path, f"{shown(there)} in the run, {shown(here)} in this spec") for path, there, here in leaves]
        threads = launch.resolved.threads_per_rank
        if threads != resolved.threads_per_rank:
            now_has = resolved.threads_per_rank
            text = f"{counted(threads, 'thread')} per rank in the run, {now_has} in this job: set it to {threads}"
            found.append(("resources.cpus_per_rank", text))
    pointers = [(f"/{path.replace('.', '/')}", text) for path, text in found]
    if spec.determinism == "strict":
        text = "that is never exact, and determinism is strict"
        problems += [FieldProblem(pointer=p, code="adopt-differs", detail=f"{told}; {text}") for p, told in pointers]
    if problems:
        raise SpecError(f"{problems[0].pointer}: {problems[0].detail}", errors=problems)
    warnings = [
        Warning_(pointer=p, code="adopt-differs", detail=f"{told}; the resume is not exact") for p, told in pointers
    ]
    if manifest.finished:
        ended = f"the run in {directory} has ended with step {manifest.step}"
        if launch is not None and not found and _is_the_runs(spec, manifest):
            text = f"{ended}, and this job would ask for no more: have the script's arguments, env or code ask for more"
            raise Conflict(text, code="nothing-left")
        text = f"{ended}: a script that asks for no more has nothing to do"
        warnings.append(Warning_(pointer=_POINTER, code="adopt-finished", detail=text))
    return warnings


def _is_the_runs(spec: JobSpec, manifest: Manifest) -> bool:
    """Would the same code do the same number of steps? False where that is not certain: of modules that the run had imported and
    of settings that it had read the service does not know, and uploaded code is not at the spec's path."""
    if (
        spec.own_code is None
        or spec.own_code.digest is not None
        or spec.script is None
        or spec.env
        or spec.secrets
        or spec.world.size != manifest.world_size
    ):
        return False
    root = Path(spec.own_code.path)
    try:
        settings = any(entry.source.suffix in _SETTINGS for entry in entries(root, UNLIMITED))
        return not settings and manifest.code_digest == script_digest({"__main__": root / spec.script[0]})
    except (OSError, TreeError):
        return False


def _copy(run: RunDirectory, manifest: Manifest, target: JobPaths, directory: str) -> None:
    try:
        run.copy(manifest, target)
    except CheckpointError as error:
        copied, theirs = str(target.root), os.path.realpath(directory)
        raise _damaged(CheckpointError(error.detail.replace(copied, theirs), code=error.code), directory) from error
    except OSError as error:
        if disk.is_full(error, target.root.parent):
            what = f"the checkpoint of {directory} cannot be copied there, and the job was not stored"
            raise disk.full(target.root.parent, what, manifest.size) from error
        raise _unreadable(error, directory) from error


def _refused(code: str, detail: str) -> SpecError:
    return _not_taken(_POINTER, code, detail)


def _not_taken(pointer: str, code: str, detail: str) -> SpecError:
    return SpecError(f"{pointer}: {detail}", errors=[FieldProblem(pointer=pointer, code=code, detail=detail)])
