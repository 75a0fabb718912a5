"""What a spec may ask of a script without a Session: to be started, stopped and started again, and no more."""

from __future__ import annotations

from typing import Final

from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.scripts import SESSION_PACKAGE, is_unmanaged
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_checkpoint import CheckpointSpec
from ratchet_hooks.specs import AllreduceSpec

WARNING: Final = "unmanaged-script"
_NO_CHECKPOINT: Final = "checkpoint-needs-session"


def check(spec: JobSpec, main_file: bytes) -> tuple[list[Warning_], list[FieldProblem]]:
    """Warnings and problems of a script whose main file does not mention the Session; none for any other."""
    if not spec.script or not is_unmanaged(main_file):
        return [], []
    name = spec.script[0]
    elsewhere = f"If a module that it imports makes the Session, import {SESSION_PACKAGE} in {name} too"
    text = (
        f"{name} has no Session of Ratchet: it is started from its first line, again after every preemption and failure, with "
        "its current directory as it left it; saving and restoring is its own affair, a hang is not detected, and the resume "
        f"report says unmanaged. Next step: docs/adoption.md. {elsewhere}"
    )
    warnings = [Warning_(pointer="/script", code=WARNING, detail=text)]
    if spec.checkpoint.every_steps not in (None, CheckpointSpec().every_steps):  # a stored spec has the default, too
        text = f"no checkpoints are made for {name}: it has no Session of Ratchet. {elsewhere}"
        warnings.append(Warning_(pointer="/checkpoint/every_steps", code=_NO_CHECKPOINT, detail=text))
    problems = []
    if spec.trial is not None:
        text = (
            f"{name} has no Session of Ratchet: Ratchet saves and restores nothing of it, so there is nothing to prove. Use a "
            f"Session or a Task (docs/adoption.md). {elsewhere}"
        )
        problems.append(FieldProblem(pointer="/script", code="trial-needs-session", detail=text))
    if spec.hook == AllreduceSpec():
        return warnings, problems
    text = (
        f"hook {spec.hook.name} would not be applied: {name} has no Session of Ratchet, whose wrap() applies it. Use a Session "
        f"or a Task (docs/adoption.md), or register the hook in the script with ratchet_hooks and leave it out here. {elsewhere}"
    )
    return warnings, [*problems, FieldProblem(pointer="/hook", code="hook-needs-session", detail=text)]
