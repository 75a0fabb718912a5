"""What node 0's agent has to say of the object store, for the resume report: left in a file before the ranks start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_worker.files import write_atomic


def leave_notes(paths: AttemptPaths, notes: Sequence[str]) -> None:
    """Raises ``OSError``."""
    write_atomic(paths.fetched_file, json.dumps(list(notes)).encode())


def fetched_notes(launch: LaunchFile) -> list[str]:
    """None where nothing was asked, or the file cannot be read: they are told as events, too."""
    try:
        found = json.loads(AttemptPaths(Path(launch.attempt_dir)).fetched_file.read_bytes())
        return [str(note) for note in found]
    except (OSError, ValueError, TypeError):
        return []
