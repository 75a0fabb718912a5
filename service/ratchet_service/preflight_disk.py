"""Pre-flight of the run directory: can checkpoints be trusted to the file system it lies on?

Rank 0 tries it before the first step, where the job runs; here it is asked before anything is queued.
"""

from __future__ import annotations

from pathlib import Path

from ratchet_service.preflight_report import Report
from ratchet_store.filesystem import examine

_POINTER = "/checkpoint"


def check(run_directory: Path, report: Report) -> None:
    """Report what is known of its file system; one that nothing is known of is tried. What cannot be tried (a full disk, a
    missing right) is left to those who will write there, and who say so."""
    try:
        verdict = examine(run_directory, known=False)
    except OSError:
        return
    if verdict.status == "refused":
        report.refuse(_POINTER, "file-system-refused", f"the run directory {verdict}")
    elif verdict.status == "noted":
        report.warn(_POINTER, "file-system", f"the run directory {verdict}")
