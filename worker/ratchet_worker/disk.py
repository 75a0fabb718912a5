"""The disk that checkpoints are written to, as an attempt found it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ratchet_contract.errors import CheckpointError
from ratchet_store.files import NOT_WRITTEN


class Disk:
    """The file system that a directory lay on when this was made. Unmounted beneath a training (``umount -l``) it leaves the
    directory below the mount point, which would take all that is written, on another disk, where no resume looks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: int | None = None
        with suppress(OSError):  # it is asked again
            self._seen = file_system(directory)

    def insist(self) -> None:
        """Raises ``CheckpointError`` where another one is there now, ``OSError`` where nobody can tell."""
        found = file_system(self._directory)
        if self._seen is None:
            self._seen = found
        elif found != self._seen:
            raise CheckpointError(
                f"{self._directory} lies on another file system than when the attempt began: that was unmounted, or "
                "another was mounted over it. Mount it again, and start the job again; older checkpoints are on it",
                code=NOT_WRITTEN,
            )


def file_system(path: Path) -> int:
    """The device that ``path`` lies on, or what is there of the way to it. Raises ``OSError``."""
    while True:
        try:
            return path.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            if path == path.parent:
                raise
            path = path.parent
