"""Pre-flight of ``start_from``: the file exists and looks like the format that its name indicates. No pickle is loaded here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ratchet_contract.errors import CheckpointError
from ratchet_contract.spec.job import JobSpec
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.preflight.report import Report
from ratchet_store.filesystem.durable_io import open_regular
from ratchet_store.format.safetensors_header import check_safetensors

_POINTER: Final = "/start_from/path"
_MAGIC: Final = (b"PK\x03\x04", b"\x80")
"""The first bytes of torch's files: a zip since 1.6, a pickle before."""


def check(spec: JobSpec, report: Report) -> None:
    """Add to ``report`` problems with ``start_from`` that are found without torch. The script must have been checked into
    ``report`` before."""
    start = spec.start_from
    if start is None:
        return
    # the check of the script gives this warning if it has no Session
    if unmanaged_script.WARNING in {w.code for w in report.warnings}:
        text = "a script without a Session loads its initial model itself: remove start_from, or use a Session in the script"
        report.refuse("/start_from", "import-unmanaged", text)
    safe = start.path.endswith(".safetensors")
    if safe and start.optimizer:
        text = "a safetensors file has no optimizer state: set it to false, or name a PyTorch checkpoint"
        report.refuse("/start_from/optimizer", "import-no-optimizer", text)
    path = Path(start.path)
    if not path.is_absolute():
        report.refuse(_POINTER, "relative-path", f"{start.path!r} must be an absolute path on the service's machine")
        return
    try:
        fault = _format_fault(Path(os.path.realpath(path)), is_safetensors=safe)
    except (FileNotFoundError, NotADirectoryError):
        report.refuse(_POINTER, "import-not-found", f"there is no file {start.path!r} on the service's machine")
    except IsADirectoryError:
        report.refuse(_POINTER, "import-not-found", f"{start.path!r} is a directory or device: name a file")
    except OSError as error:
        report.refuse(_POINTER, "unreadable", f"cannot read {start.path!r}: {error.strerror or error}")
    else:
        if fault is not None:
            report.refuse(_POINTER, "import-unreadable", f"{start.path!r} {fault}")


def _format_fault(path: Path, *, is_safetensors: bool) -> str | None:
    """Return what is wrong with the format of the file, as the end of a sentence; None: nothing was found. Raise ``OSError``."""
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        if is_safetensors:
            try:
                check_safetensors(file, os.fstat(fd).st_size)
            except CheckpointError as error:
                return f"is not a complete safetensors file: {error.detail}"
            return None
        if not file.read(4).startswith(_MAGIC):
            return "is not a PyTorch checkpoint; a safetensors file must be named NAME.safetensors"
    return None
