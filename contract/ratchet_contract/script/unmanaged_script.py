"""Determines from the text of a script's main file whether the script is unmanaged (has no Session), and says why a hook would
have no effect in such a script. No code is run."""

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
    """Return why ``hook`` cannot be applied to a script without a Session (the file ``script``); None for the default hook,
    which need not be applied."""
    if hook == AllreduceSpec():
        return None
    return (
        f"hook {hook.name} would not be applied: {script} has no Session of Ratchet, whose wrap() applies it. Use a Session or a "
        "Task (docs/adoption.md), or register the hook in the script with ratchet_hooks and leave it out here. If a module that "
        f"it imports makes the Session, import {SESSION_PACKAGE} in {script} too"
    )


def is_unmanaged(main_file: bytes) -> bool:
    """True if the script, by the text of its main file, has no Session; it is then assumed to save and restore its state itself.

    That is so if none of these is in the main file: the word ``ratchet_worker`` (the package that contains ``Session``), an
    import of a module of ``ratchet`` (``ratchet.accelerate``), an import of ``ratchet`` together with the word ``Session``.

    This is a simple textual rule, not an analysis. If the script imports a module that makes the Session, the result is True, and
    the script is managed only from the moment when the Session is made. If the main file mentions ``ratchet_worker``, even in a
    comment, the result is False.
    """
    if SESSION_PACKAGE.encode() in main_file or _IMPORT_OF_MODULE.search(main_file):
        return False
    return _IMPORT.search(main_file) is None or b"Session" not in main_file
