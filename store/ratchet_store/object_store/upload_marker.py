"""``UPLOADED.json`` next to the checkpoints: the record of what was copied from this directory to an object store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import checkpoint_dir_name, parse_checkpoint_dir_name
from ratchet_store.filesystem.durable_io import MISSING, open_regular, read_error, write_error

RECORD_NAME: Final = "UPLOADED.json"
_MAX_BYTES: Final = 64 << 20  # bytes; hundreds of thousands of checkpoints
Id = tuple[int, int]


class Record:
    """The record, in the file ``path``, of the checkpoints copied to the store ``url``. It starts empty if the file cannot be
    used. Methods that write raise ``CheckpointError``."""

    def __init__(self, path: Path, url: str) -> None:
        self._path, self._url = path, url
        self._rows: dict[str, dict[str, object]] = {}
        try:
            data = json.loads(read_bytes(path, _MAX_BYTES))
            if data["where"] == url:
                self._rows = {str(k): dict(v) for k, v in data["checkpoints"].items() if parse_checkpoint_dir_name(k)}
        except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
            pass  # then nothing is known to have been copied, and nothing is deleted

    def ids(self) -> list[Id]:
        """Return step and attempt of every recorded checkpoint, ascending."""
        return sorted(one for one in map(parse_checkpoint_dir_name, self._rows) if one is not None)

    def is_pinned(self, checkpoint: Id) -> bool:
        """True if the checkpoint was pinned when it was last recorded, or that is unknown. Raises ``KeyError`` if it is not
        recorded."""
        return bool(self._rows[checkpoint_dir_name(*checkpoint)].get("pinned", True))

    def add(self, folder: str, digest: str, *, pinned: bool) -> None:
        """Record on the disk that the checkpoint ``folder`` has been copied, and whether it is pinned."""
        row: dict[str, object] = {"digest": digest, "pinned": pinned}
        if self._rows.get(folder) != row:
            self._write({**self._rows, folder: row})

    def drop(self, folder: str) -> None:
        """Remove a checkpoint from the record, on the disk too, after its copy has been deleted."""
        self._write({k: v for k, v in self._rows.items() if k != folder})

    def _write(self, rows: dict[str, dict[str, object]]) -> None:
        """Replace the file, then the rows in memory. Raises ``CheckpointError``."""
        data = json.dumps({"where": self._url, "checkpoints": rows}, indent=1).encode()
        try:
            write_atomic(self._path, data, durable=True)
        except OSError as error:
            raise write_error(self._path, error) from error
        self._rows = rows


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises ``CheckpointError``, such as
    ``checkpoint-missing``."""
    try:
        fd = open_regular(path)
        with os.fdopen(fd, "rb") as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise CheckpointError(f"{path} is larger than {limit} bytes")
            return file.read(limit)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", code=MISSING) from None
    except OSError as error:
        raise read_error(path, error) from error
