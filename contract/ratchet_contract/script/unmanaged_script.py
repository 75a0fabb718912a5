"""Determines from a script's text whether the script is unmanaged, that is, has no Session."""

from __future__ import annotations

import re
from typing import Final

from ratchet_hooks.specs.hook_specs import AllreduceSpec, HookSpec

SESSION_PACKAGE: Final = "ratchet_worker"
# As in `import numpy as np, ratchet`. No byte matches in two ways: the time would grow exponentially with a hostile line.
_OTHERS: Final = rb"(?:[^\s,\\]+(?:[ \t]+as[ \t]+[^\s,\\]+)?[ \t]*,[ \t]*(?:\\\r?\n[ \t]*)?)*"
_NAME: Final = rb"\b(?:from\s+|import\s+" + _OTHERS + rb")ratchet"
_IMPORT: Final = re.compile(_NAME + rb"\b")
_IMPORT_OF_MODULE: Final = re.compile(_NAME + rb"\.\w")


def unapplied_hook_message(script: str, hook: HookSpec) -> str | None:
    """Return why ``hook`` cannot be applied to the unmanaged file ``script``; None for the default hook."""
    if hook == AllreduceSpec():
        return None
    return (
        f"hook {hook.name} would not be applied: {script} has no Session of Ratchet, whose wrap() applies it. Use a Session or a "
        "Task (docs/adoption.md), or register the hook in the script with ratchet_hooks and leave it out here. If a module that "
        f"it imports makes the Session, import {SESSION_PACKAGE} in {script} too"
    )


def is_unmanaged(main_file: bytes) -> bool:
    """Return True if the text of a script's main file shows no sign of a Session. Imported modules are not read."""
    if SESSION_PACKAGE.encode() in main_file or _IMPORT_OF_MODULE.search(main_file):
        return False
    return _IMPORT.search(main_file) is None or b"Session" not in main_file
