"""The code that a script has imported by now, as a digest: what a run without a service knows of its code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from ratchet_contract import code_tree
from ratchet_worker.object_walk import is_users_module

_MAIN: Final = ("__main__", "__mp_main__")
"""Names of the main file; under the second some programs know it, too."""


def digest(script: Path | None) -> str | None:
    """Of the main file and the modules of the user's that are imported by now; None: there are none. What else lies beside them
    may be written by the run itself."""
    found = {"__main__": script} if script is not None else {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name not in _MAIN and isinstance(file, str) and is_users_module(name) and Path(file).is_file():
            found[name] = Path(file)
    return code_tree.script_digest(found) if found else None
