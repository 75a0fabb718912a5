"""Notes of node 0's agent about the object store, in a file, for the resume report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.protocol.messages import LaunchFile


def write_notes(paths: AttemptPaths, notes: Sequence[str]) -> None:
    """Write ``notes`` to the attempt's file, for the ranks. Raises ``OSError``."""
    write_atomic(paths.fetch_notes_file, json.dumps(list(notes)).encode(), durable=False)


def read_notes(launch: LaunchFile) -> list[str]:
    """Return the notes that node 0's agent has written for this attempt; empty if they cannot be read."""
    try:
        found = json.loads(AttemptPaths(Path(launch.attempt_dir)).fetch_notes_file.read_bytes())
        return [str(note) for note in found]
    except (OSError, ValueError, TypeError):
        return []
