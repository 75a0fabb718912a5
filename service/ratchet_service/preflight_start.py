"""Pre-flight of ``start_from``: the file is there and looks like what it is said to be. No pickle is opened here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ratchet_contract.errors import CheckpointError
from ratchet_contract.spec import JobSpec
from ratchet_service import unmanaged
from ratchet_service.preflight_report import Report
from ratchet_store.files import open_regular
from ratchet_store.header import check_plain

_POINTER: Final = "/start_from/path"
_MAGIC: Final = (b"PK\x03\x04", b"\x80")
"""How torch's files begin: a zip since 1.6, a pickle before."""


def check(spec: JobSpec, report: Report) -> None:
    """Report what can be known without torch."""
    start = spec.start_from
    if start is None:
        return
    if unmanaged.WARNING in {w.code for w in report.warnings}:
        text = "a script without a Session loads what it begins with itself: leave start_from out, or give it a Session"
        report.refuse("/start_from", "import-unmanaged", text)
    safe = start.path.endswith(".safetensors")
    if safe and start.optimizer:
        text = "a safetensors file holds no optimizer: set it to false, or name a PyTorch checkpoint"
        report.refuse("/start_from/optimizer", "import-no-optimizer", text)
    path = Path(start.path)
    if not path.is_absolute():
        report.refuse(_POINTER, "relative-path", f"{start.path!r} must be an absolute path on the service's machine")
        return
    try:
        fault = _fault(Path(os.path.realpath(path)), safe=safe)
    except (FileNotFoundError, NotADirectoryError):
        report.refuse(_POINTER, "import-not-found", f"there is no file {start.path!r} on the service's machine")
    except IsADirectoryError:
        report.refuse(_POINTER, "import-not-found", f"{start.path!r} is a directory or device: name a file")
    except OSError as error:
        report.refuse(_POINTER, "unreadable", f"cannot read {start.path!r}: {error.strerror or error}")
    else:
        if fault is not None:
            report.refuse(_POINTER, "import-unreadable", f"{start.path!r} {fault}")


def _fault(path: Path, *, safe: bool) -> str | None:
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        if safe:
            try:
                check_plain(file, os.fstat(fd).st_size)
            except CheckpointError as error:
                return f"is not a whole safetensors file: {error.detail}"
            return None
        if not file.read(4).startswith(_MAGIC):
            return "is no PyTorch checkpoint; a safetensors file is named NAME.safetensors"
    return None
