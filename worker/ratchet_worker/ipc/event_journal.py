"""The journal of event files: JSON lines, which ranks add, and the agent when it makes a checkpoint of copies in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(journal: Path, entry: dict[str, Any]) -> None:
    """Append a line durably, in place of a last line that a kill has cut off. Raises ``OSError``."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a+b") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            os.ftruncate(file.fileno(), journal.read_bytes().rfind(b"\n") + 1)
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
