"""``control.json``: the newest desired state. The agent writes it by rename; each rank polls it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.protocol.messages import Control


def write_control(path: Path, control: Control) -> None:
    """Replace the desired state in the file ``path``. Raises ``OSError`` if that fails; the old state then stays in force."""
    write_atomic(path, control.model_dump_json().encode(), durable=False)


class ControlReader:
    """Reads the desired state in ``control.json``, whenever it has changed. Not thread-safe: use one reader per thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_mark: tuple[int, int, int] | None = None

    def poll(self) -> Control | None:
        """Return the desired state if the file has changed since a call last returned it; None if not, or if unreadable."""
        try:
            stat = self._path.stat()
            mark = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if mark == self._last_mark:
                return None
            control = Control.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return None
        self._last_mark = mark
        return control
