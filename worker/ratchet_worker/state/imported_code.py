"""A digest of the code that a script has imported so far."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from ratchet_contract.code import tree
from ratchet_worker.state.object_walk import is_user_module

_MAIN: Final = ("__main__", "__mp_main__")
"""Names of the main file's module; some programs import it under the second one, too."""


def digest(script: Path | None) -> str | None:
    """Return a digest of the file ``script`` and of the user's modules imported so far; None without any."""
    # Without other files next to them, which the run itself may write.
    found = {"__main__": script} if script is not None else {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name not in _MAIN and isinstance(file, str) and is_user_module(name) and Path(file).is_file():
            found[name] = Path(file)
    return tree.script_digest(found) if found else None
