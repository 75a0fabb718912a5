"""Determines the job that a ``ratchet run`` trains: the unfinished one of the same command, or a new one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ratchet_client.cli.shared import output
from ratchet_contract.code.choice import IGNORE_FILES, choose
from ratchet_contract.code.tree import UNLIMITED, TreeError, differing_paths, list_entries, tree_digest
from ratchet_contract.errors import Conflict, RatchetError, Refused
from ratchet_contract.paths import (
    MANIFEST_NAME,
    RUN_DIRECTORY,
    RUN_MARK_NAME,
    HomePaths,
    JobPaths,
    parse_checkpoint_dir_name,
)
from ratchet_contract.phases import JobPhase
from ratchet_contract.plural import join_first
from ratchet_contract.spec.parse import parse_spec
from ratchet_contract.spec.run_without_service import differing_leaves, value_text

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import JobView

LABEL: Final = "ratchet-run"
"""The label by which a job is found again; its value is the digest of the command."""
_READ: Final = ("task", "script", "hook", "world")
"""Keys of the spec whose values may come from the script's text."""
_LOGS: Final = (".log", ".out", ".err")
"""Suffixes of files that may hold this command's output, or that batch systems write: they do not count as changed code."""


@dataclass(frozen=True)
class SelectedJob:
    """The job that this command trains. ``attempt``: number of the job's last attempt before this command; 0 for a new job.
    ``event``: id of the job's last event before this command; None for a new job."""

    job: JobView
    attempt: int = 0
    event: int | None = None


def command_digest(command_parts: Mapping[str, Any]) -> str:
    """Return a digest (12 hexadecimal digits) of everything that the command specifies, by which its job is found."""
    return hashlib.sha256(json.dumps(command_parts, sort_keys=True).encode()).hexdigest()[:12]


def begin(
    client: RatchetClient, home: HomePaths, spec: dict[str, Any], mark: str, *, new: bool, adopt: Path | None
) -> SelectedJob:
    """Return the job to train. This is the newest job of this command, resumed, if it ``is_resumable``; otherwise it is a new
    job. ``mark``: the command's digest. ``new``: submit a new job in any case, and first cancel the old one if it has not ended.
    ``adopt``: the directory of a run without a service, which a new job continues. Raise ``Refused`` if ``adopt`` is set, ``new``
    is not, and the old job is resumable. Raise errors of the service, such as ``Conflict`` and ``SpecError``."""
    known = next(client.jobs(label={LABEL: mark}, page_size=1), None)
    if known is not None and adopt is not None and not new and is_resumable(known):
        raise Refused(
            f"--adopt begins a new job, and {known.id} of this command is unfinished: leave --adopt out, or add --new"
        )
    if known is not None and new and not known.phase.terminal:
        client.cancel(known.id)
        client.wait(known.id)
    if known is None or new or not is_resumable(known):
        from ratchet_client.cli.commands.submit import note_adoption, print_warnings

        if known is not None and known.phase is JobPhase.SUCCEEDED:
            output.note(f"{known.id} of this command has succeeded; another job begins from step 0")
        labels = {**(spec.get("labels") or {}), LABEL: mark}
        job = client.submit({**spec, "labels": labels}, adopt=adopt, note=output.note).view
        print_warnings(job.warnings)
        output.note(f"{job.id} ({job.name}) starts")
        note_adoption(job)
        if job.adopted_from is None and known is None and Path(RUN_DIRECTORY, RUN_MARK_NAME).is_file():
            output.note(
                f"./{RUN_DIRECTORY} has a run without a service; this job begins at step 0, and `ratchet run --adopt "
                f"{RUN_DIRECTORY} ...` continues from it"
            )
        return SelectedJob(job)
    _warn_changed_spec(spec, known)
    return _continue_job(client, home, known)


def _warn_changed_spec(spec: dict[str, Any], job: JobView) -> None:
    """Print a warning if ``spec`` differs from the spec of the continued ``job`` in keys whose values may come from the script's
    text."""
    now = parse_spec(spec).model_dump(mode="json")
    odd = [leaf for key in _READ for leaf in differing_leaves(key, job.spec.get(key), now[key])]
    if odd:
        told = ", ".join(f"{path} ({value_text(before)}, now {value_text(here)})" for path, before, here in odd)
        output.note(f"warning: {job.id} keeps its spec, and a new job of this command would have another: {told}")


def is_resumable(job: JobView) -> bool:
    """Return True if the same command continues ``job``: it has not ended, or it has failed and has a checkpoint."""
    return not job.phase.terminal or (job.phase is JobPhase.FAILED and job.last_checkpoint is not None)


def _continue_job(client: RatchetClient, home: HomePaths, job: JobView) -> SelectedJob:
    """Resume ``job`` and return it. If its code has changed, it resumes with the new code. A queued or running job is first
    suspended for that, which blocks. If the resume with the new code fails, a job that was suspended for it resumes with its old
    code. Raise errors such as ``Conflict``."""
    event = next((event.id for event in client.events(job.id, sort="-id", page_size=1)), None)
    changed = _changed_code(home, job)
    words = ""
    if changed:
        stopped = False
        if (
            not job.phase.terminal and job.phase is not JobPhase.SUSPENDED
        ):  # code is only replaced while no attempt can be alive
            if _refuses_new_code(job):
                raise _strict_conflict(changed, f"{job.id} keeps the code that it has, since its determinism is strict")
            output.note(f"the code has changed: {job.id} is stopped first")
            stopped = _suspend_and_wait(client, job.id)
        try:
            client.resume(job.id, code=Path(job.spec["code"]["path"]), note=output.note)
        except RatchetError as error:
            if stopped:
                with suppress(RatchetError):  # the first error is the one to report
                    client.resume(job.id)
                    output.note(f"{job.id} is resumed with the code that it had")
            if error.code == "code-mismatch":
                raise _strict_conflict(changed, error.detail) from None
            raise
        words = f", with the code as it is now ({join_first(changed)} changed): not exact"
        if no_code := [path for path in changed if not path.endswith(".py")]:
            rest = "it is then neither copied nor compared"
            output.note(f"files that are not code ({join_first(no_code)}) can be listed in .ratchetignore: {rest}")
    else:
        client.resume(job.id)
    step = _newest_step(home.job(job.id), job)
    output.note(f"continuing {job.id} from {f'step {step}' if step else 'its beginning'}{words}; --new starts another")
    return SelectedJob(client.view(job.id), job.attempt, event)


def _suspend_and_wait(client: RatchetClient, job_id: str) -> bool:
    """Suspend the job and block until it is suspended (True) or has failed resumably (False). Raise ``Conflict`` if it ended
    otherwise."""
    with suppress(Conflict):  # it has ended, or is being cancelled
        client.suspend(job_id)
    job = client.wait(job_id, until=(JobPhase.SUSPENDED,))
    if not is_resumable(job):
        raise Conflict(
            f"{job_id} ended as {job.phase} before it could be stopped, with the code that it had; the same `ratchet run ...` "
            "starts another job, with the code as it is then",
            code="job-ended",
        )
    return not job.phase.terminal


def _refuses_new_code(job: JobView) -> bool:
    """Return True if the service will refuse other code for the unfinished ``job``: its determinism is strict, and it has a
    checkpoint or will save one when it is suspended."""
    # The suspension of a job that trains saves a checkpoint.
    trains = job.phase.active and job.progress.step > 0
    return job.spec.get("determinism") == "strict" and (job.last_checkpoint is not None or trains)


def _strict_conflict(changed: list[str], detail: str) -> Conflict:
    """Return, and do not raise, the error for code that strict determinism forbids to change. ``changed``: the changed files."""
    cure = (
        "the same command continues it when that is undone; `ratchet run --new ...` starts another job, with the code as it is "
        "now, and cancels this one if it has not ended"
    )
    return Conflict(f"{join_first(changed)} changed: {detail}; {cure}", code="code-mismatch")


def _newest_step(paths: JobPaths, job: JobView) -> int:
    """Return the highest step of the job's checkpoints that are on the disk or known to the service, 0 if there is none."""
    # The service may lack the last reports of an attempt that was killed together with it.
    names = [path.parent.name for path in paths.checkpoints.glob(f"*/{MANIFEST_NAME}")] + [job.last_checkpoint or ""]
    return max((found[0] for name in names if (found := parse_checkpoint_dir_name(name)) is not None), default=0)


def _changed_code(home: HomePaths, job: JobView) -> list[str]:
    """Return the files of the job's code that have changed since its snapshot. Some files, such as logs and ignored files, are
    left out. Return an empty list, possibly after a warning, if the changes are unknown."""
    code, copied = job.spec.get("code") or {}, job.resolved.code_digest
    if code.get("source") != "snapshot" or copied is None:
        return []
    try:
        now = choose(Path(code["path"]), code.get("include") or ())
        if tree_digest(now.entries) == copied:
            return []
        changed = differing_paths(list_entries(home.code / copied, UNLIMITED), now.entries)
    except (TreeError, OSError) as error:
        output.note(
            f"warning: cannot tell whether the code in {code['path']} changed ({error}): the job continues with its own copy"
        )
        return []
    root = Path(code["path"])
    return [
        path for path in changed
        if not (path.endswith((*_LOGS, *IGNORE_FILES)) or now.is_left_out(path) or _is_own(root / path))
    ]  # fmt: skip


def _is_own(path: Path) -> bool:
    """Return True if ``path`` is this command's standard output or error, or a spec that ``ratchet init`` has written."""
    from ratchet_client.init.render_yaml import is_generated

    with suppress(OSError):  # the file is gone, or a stream is closed
        return is_generated(path) or any(os.path.samestat(path.stat(), os.fstat(stream)) for stream in (1, 2))
    return False
