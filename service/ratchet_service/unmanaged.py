"""What a spec may ask of a script without a Session: to be started, stopped and started again, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ratchet_contract.api import Warning_
from ratchet_contract.errors import Conflict, FieldProblem
from ratchet_contract.scripts import SESSION_PACKAGE, is_unmanaged, unapplied_hook
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_checkpoint import CheckpointSpec

WARNING: Final = "unmanaged-script"
NO_CHECKPOINT: Final = "checkpoint-needs-session"
UNMANAGED: Final = "unmanaged"
"""The verdict of its resume reports."""


def check(spec: JobSpec, main_file: bytes) -> tuple[list[Warning_], list[FieldProblem]]:
    """Warnings and problems of a script whose main file does not mention the Session; none for any other."""
    if not spec.script or not is_unmanaged(main_file):
        return [], []
    name = spec.script[0]
    elsewhere = f"If a module that it imports makes the Session, import {SESSION_PACKAGE} in {name} too"
    text = (
        f"{name} has no Session of Ratchet: it is started from its beginning, again after every preemption and failure, with "
        "its current directory as it left it; saving and restoring is its own affair, a hang is not detected, and the resume "
        f"report says unmanaged. Next step: `ratchet init --patch {name}` prints the change (docs/adoption.md). {elsewhere}"
    )
    warnings = [Warning_(pointer="/script", code=WARNING, detail=text)]
    if spec.checkpoint.every_steps not in (None, CheckpointSpec().every_steps):  # a stored spec has the default, too
        text = f"no checkpoints are made for {name}: it has no Session of Ratchet. {elsewhere}"
        warnings.append(Warning_(pointer="/checkpoint/every_steps", code=NO_CHECKPOINT, detail=text))
    problems = []
    if spec.trial is not None:
        text = (
            f"{name} has no Session of Ratchet: Ratchet saves and restores nothing of it, so there is nothing to prove. Use a "
            f"Session or a Task (docs/adoption.md). {elsewhere}"
        )
        problems.append(FieldProblem(pointer="/script", code="trial-needs-session", detail=text))
    return warnings, [*problems, *hook_problems(spec, main_file)]


def hook_problems(spec: JobSpec, main_file: bytes) -> list[FieldProblem]:
    """Of the hook that a script without a Session would not apply."""
    refusal = unapplied_hook(spec.script[0], spec.hook) if spec.script and is_unmanaged(main_file) else None
    return [] if refusal is None else [FieldProblem(pointer="/hook", code="hook-needs-session", detail=refusal)]


def main_file(spec: JobSpec) -> bytes | None:
    """The script's own file, as ``code.path`` has it; None where there is none that can be read here."""
    if spec.script is None or spec.own_code is None:
        return None
    try:
        return (Path(spec.own_code.path) / spec.script[0]).read_bytes()
    except OSError:
        return None


def reported(report: Mapping[str, Any] | None) -> bool:
    """Does an attempt's resume report say that its script has made no Session (so far)?"""
    return (report or {}).get("verdict") == UNMANAGED


def refuse_request(script: str) -> Conflict:
    """The answer to "save a checkpoint now"."""
    text = (
        f"{script} has made no Session of Ratchet: it saves by itself, and nothing of it can be saved on request. Use a Session "
        "or a Task (docs/adoption.md)"
    )
    return Conflict(text, code=NO_CHECKPOINT)
