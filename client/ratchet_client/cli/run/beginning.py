"""Which job a ``ratchet run`` trains: the unfinished one of the same command, or a new one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ratchet_client.cli import output
from ratchet_contract.code_choice import IGNORE_FILES, choose
from ratchet_contract.code_tree import UNLIMITED, TreeError, differing, digest, entries
from ratchet_contract.errors import Conflict
from ratchet_contract.paths import MANIFEST_NAME, HomePaths, JobPaths, parse_checkpoint_dir_name
from ratchet_contract.phases import JobPhase
from ratchet_contract.plural import first_of
from ratchet_contract.run_without_service import shown, unequal
from ratchet_contract.spec_parse import parse_spec

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient
    from ratchet_contract.api import JobView

LABEL: Final = "ratchet-run"
"""The label by which a job is found again: the digest of its command."""
_READ: Final = ("task", "script", "hook", "world")
"""Keys of the spec that are found in the script's text, among others."""
_LOGS: Final = (".log", ".out", ".err")
"""What this command's own output is sent to, beside the script, and what batch systems write there: no change of the code."""


@dataclass(frozen=True)
class Begun:
    """``attempt`` and ``event``: the last of those that another command has shown, 0 and None for a new job."""

    job: JobView
    attempt: int = 0
    event: int | None = None


def command_digest(said: Mapping[str, Any]) -> str:
    """Of all that the command says: the same command is the same job."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


def begin(client: RatchetClient, home: HomePaths, spec: dict[str, Any], mark: str, *, new: bool) -> Begun:
    """Let the newest job of this command, whose digest is ``mark``, go on where it is unfinished; else, or with ``new``, submit
    another of ``spec``.

    Raises what the requests raise: ``SpecError``, ``Conflict`` where
    strict determinism forbids changed code.
    """
    known = next(client.jobs(label={LABEL: mark}, page_size=1), None)
    if known is not None and new and not known.phase.terminal:
        client.cancel(known.id)
        client.wait(known.id)
    if known is None or new or not unfinished(known):
        from ratchet_client.cli.submit import print_warnings

        if known is not None and known.phase is JobPhase.SUCCEEDED:
            output.note(f"{known.id} of this command has succeeded; another job begins from step 0")
        job = client.submit({**spec, "labels": {**(spec.get("labels") or {}), LABEL: mark}}, note=output.note).view
        print_warnings(job.warnings)
        output.note(f"{job.id} ({job.name}) starts")
        return Begun(job)
    _say_what_is_read_otherwise(spec, known)
    return _go_on(client, home, known)


def _say_what_is_read_otherwise(spec: dict[str, Any], job: JobView) -> None:
    """The script's text may be another now, of which a new job would have another spec: the one that goes on keeps its own."""
    now = parse_spec(spec).model_dump(mode="json")
    odd = [leaf for key in _READ for leaf in unequal(key, job.spec.get(key), now[key])]
    if odd:
        told = ", ".join(f"{path} ({shown(before)}, now {shown(here)})" for path, before, here in odd)
        output.note(f"warning: {job.id} keeps its spec, and a new job of this command would have another: {told}")


def unfinished(job: JobView) -> bool:
    """The same command goes on with it: it has not ended, or failed with a checkpoint."""
    return not job.phase.terminal or (job.phase is JobPhase.FAILED and job.last_checkpoint is not None)


def _go_on(client: RatchetClient, home: HomePaths, job: JobView) -> Begun:
    event = max((event.id for event in client.events(job.id)), default=None)
    changed = _changed_code(home, job)
    words = ""
    if changed:
        if (
            not job.phase.terminal and job.phase is not JobPhase.SUSPENDED
        ):  # code is exchanged while no attempt may be alive
            output.note(f"the code has changed: {job.id} is stopped first")
            client.suspend(job.id)
            client.wait(job.id, until=(JobPhase.SUSPENDED,))
        try:
            client.resume(job.id, code=Path(job.spec["code"]["path"]), note=output.note)
        except Conflict as error:  # strict determinism
            cure = "`ratchet run --new ...` starts another job, with the code as it is now"
            detail = f"{first_of(changed)} changed: {error.detail}; {cure}"
            raise Conflict(detail, code=error.code) from None
        words = f", with the code as it is now ({first_of(changed)} changed): not exact"
        if no_code := [path for path in changed if not path.endswith(".py")]:
            rest = "it is then neither copied nor compared"
            output.note(f"what is no code ({first_of(no_code)}) may be named in .ratchetignore: {rest}")
    else:
        client.resume(job.id)
    step = _newest_step(home.job(job.id), job)
    output.note(
        f"goes on with {job.id} from {f'step {step}' if step else 'its beginning'}{words}; --new starts another"
    )
    return Begun(client.view(job.id), job.attempt, event)


def _newest_step(paths: JobPaths, job: JobView) -> int:
    """The highest step of its checkpoints: the service may lack the last reports of an attempt that was killed with it."""
    names = [path.parent.name for path in paths.checkpoints.glob(f"*/{MANIFEST_NAME}")] + [job.last_checkpoint or ""]
    return max((found[0] for name in names if (found := parse_checkpoint_dir_name(name)) is not None), default=0)


def _changed_code(home: HomePaths, job: JobView) -> list[str]:
    """The files of the job's code that are others than when it was copied, but for logs, what this command writes to, specs of
    ``ratchet init``, and what ignore files name by now; none where that cannot be told."""
    code, copied = job.spec.get("code") or {}, job.resolved.code_digest
    if code.get("source") != "snapshot" or copied is None:
        return []
    try:
        now = choose(Path(code["path"]), code.get("include") or ())
        if digest(now.entries) == copied:
            return []
        changed = differing(entries(home.code / copied, UNLIMITED), now.entries)
    except (TreeError, OSError) as error:
        output.note(
            f"warning: is the code in {code['path']} changed? {error}: the job goes on with its copy of the code"
        )
        return []
    root = Path(code["path"])
    return [
        path for path in changed
        if not (path.endswith((*_LOGS, *IGNORE_FILES)) or now.leaves_out(path) or _is_own(root / path))
    ]  # fmt: skip


def _is_own(path: Path) -> bool:
    """Does this command itself write to it, or has ``ratchet init`` written it?"""
    from ratchet_client.init.spec_yaml import is_made

    with suppress(OSError):  # it is gone, or a stream is closed
        return is_made(path) or any(os.path.samestat(path.stat(), os.fstat(stream)) for stream in (1, 2))
    return False
