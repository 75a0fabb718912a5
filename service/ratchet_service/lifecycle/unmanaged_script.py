"""Checks of a spec whose script has no Session (*unmanaged*): Ratchet starts, stops and restarts it, and saves none
of its state."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import Conflict, FieldProblem
from ratchet_contract.script.unmanaged_script import SESSION_PACKAGE, is_unmanaged, unapplied_hook_message
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_contract.spec.job import JobSpec
from ratchet_service.isolation.file_access import open_read

WARNING: Final = "unmanaged-script"
NO_CHECKPOINT: Final = "checkpoint-needs-session"
UNMANAGED: Final = "unmanaged"
"""The verdict of such a script's resume reports."""
_MAX_BYTES: Final = 16 << 20


def check(spec: JobSpec, main_file: bytes) -> tuple[list[Warning_], list[FieldProblem]]:
    """Return the warnings and problems of ``spec`` if its script has no Session; otherwise two empty lists. ``main_file``: the
    source of the script's main file, which shows whether there is a Session."""
    if not spec.script or not is_unmanaged(main_file):
        return [], []
    name = spec.script[0]
    elsewhere = f"If a module that it imports makes the Session, import {SESSION_PACKAGE} in {name} too"
    text = (
        f"{name} has no Session of Ratchet: it is started from its first line, again after every preemption and failure, "
        "with its current directory unchanged; it must save and restore its own state, a hang is not "
        "detected, and the resume "
        f"report says unmanaged. Next step: `ratchet init --patch {name}` prints the change (docs/adoption.md). {elsewhere}"
    )
    warnings = [Warning_(pointer="/script", code=WARNING, detail=text)]
    if spec.checkpoint.every_steps not in (None, CheckpointSpec().every_steps):  # a stored spec has the default, too
        text = f"no checkpoints are made for {name}: it has no Session of Ratchet. {elsewhere}"
        warnings.append(Warning_(pointer="/checkpoint/every_steps", code=NO_CHECKPOINT, detail=text))
    problems = []
    if spec.trial is not None:
        text = (
            f"{name} has no Session of Ratchet: Ratchet saves and restores none of its state, so there is nothing to "
            "prove. Use a "
            f"Session or a Task (docs/adoption.md). {elsewhere}"
        )
        problems.append(FieldProblem(pointer="/script", code="trial-needs-session", detail=text))
    return warnings, [*problems, *hook_problems(spec, main_file)]


def hook_problems(spec: JobSpec, main_file: bytes) -> list[FieldProblem]:
    """Return a problem if the spec's script would not apply its hook, since its main file has no Session."""
    refusal = unapplied_hook_message(spec.script[0], spec.hook) if spec.script and is_unmanaged(main_file) else None
    return [] if refusal is None else [FieldProblem(pointer="/hook", code="hook-needs-session", detail=refusal)]


def read_main_file(spec: JobSpec) -> bytes | None:
    """Return the content of the script's main file on this machine; None if the spec has no script or no
    code for a snapshot, or the file cannot be read."""
    if spec.script is None or spec.snapshot_code is None:
        return None
    try:
        return read_source(Path(spec.snapshot_code.path) / spec.script[0])
    except OSError:
        return None


def read_source(path: Path) -> bytes:
    """Return the content of a script. Raises ``OSError``, also for more than ``_MAX_BYTES`` or anything but a regular file."""
    with open_read(path) as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MAX_BYTES >> 20} MiB. Move data out of it into other files")
    return content


def is_reported_unmanaged(report: Mapping[str, Any] | None) -> bool:
    """True if an attempt's resume report says that its script has made no Session so far."""
    return (report or {}).get("verdict") == UNMANAGED


def checkpoint_request_conflict(script: str) -> Conflict:
    """Return (not raise) the error for a request to save a checkpoint of the script ``script``, which has no Session."""
    text = (
        f"{script} has made no Session of Ratchet: Ratchet cannot save its state on request. Use a Session "
        "or a Task (docs/adoption.md)"
    )
    return Conflict(text, code=NO_CHECKPOINT)
