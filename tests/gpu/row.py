"""The process of one row: ``python -m tests.gpu.row FUNCTION FOLDER DEVICE SIZE SECONDS``. Standard library only.

Writes ``end.json`` into FOLDER: ``seen``, the sentence that the row returned, or ``error``, the traceback.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.work import Work

_PR_SET_PDEATHSIG = 1


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive who watches its time
    function, folder, device, size, seconds = sys.argv[1:]
    work = Work(device, size, Path(folder), float(seconds))  # type: ignore[arg-type]
    module, _, name = function.partition(":")
    try:
        end: dict[str, Any] = {"seen": getattr(import_module(module), name)(work)}
    except Exception as error:
        traceback.print_exc()
        end = {"error": f"{type(error).__name__}: {error}"}
    temporary = work.folder / "end.tmp"
    temporary.write_text(json.dumps(end))
    temporary.rename(work.folder / "end.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
