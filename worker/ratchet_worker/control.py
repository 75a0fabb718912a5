"""``control.json``: the agent's newest wish, written by rename; every rank polls it at the price of one ``stat``."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ratchet_contract.messages import Control
from ratchet_worker.files import write_atomic


def write_control(path: Path, control: Control) -> None:
    """Replace the wish. Raises ``OSError`` when the disk refuses; the old wish then stands."""
    write_atomic(path, control.model_dump_json().encode())


class ControlReader:
    """Tells each change once. Not thread-safe: one reader per thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def poll(self) -> Control | None:
        """The wish, if the file is new since the last call; None when it is not, is missing, or cannot be read yet."""
        try:
            stat = self._path.stat()
            mark = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if mark == self._seen:
                return None
            control = Control.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return None
        self._seen = mark
        return control
