"""``UPLOADED.json`` beside the checkpoints: what was copied from this very directory into an object store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import checkpoint_dir_name, parse_checkpoint_dir_name
from ratchet_store.files import MISSING, not_read, not_written, open_regular, replacing, write_all

RECORD_NAME: Final = "UPLOADED.json"
_MOST: Final = 64 << 20  # bytes; hundreds of thousands of checkpoints
Id = tuple[int, int]


class Record:
    """Of what was copied to ``where``. One that cannot be read knows of nothing. Methods that write raise ``CheckpointError``."""

    def __init__(self, path: Path, where: str) -> None:
        self._path, self._where = path, where
        self._rows: dict[str, dict[str, object]] = {}
        try:
            data = json.loads(read_bytes(path, _MOST))
            if data["where"] == where:
                self._rows = {str(k): dict(v) for k, v in data["checkpoints"].items() if parse_checkpoint_dir_name(k)}
        except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
            pass  # then nothing is known to have been copied, and nothing is deleted

    def ids(self) -> list[Id]:
        return sorted(one for one in map(parse_checkpoint_dir_name, self._rows) if one is not None)

    def pinned(self, one: Id) -> bool:
        return bool(self._rows[checkpoint_dir_name(*one)].get("pinned", True))

    def add(self, folder: str, digest: str, *, pinned: bool) -> None:
        row: dict[str, object] = {"digest": digest, "pinned": pinned}
        if self._rows.get(folder) != row:
            self._write({**self._rows, folder: row})

    def drop(self, folder: str) -> None:
        self._write({k: v for k, v in self._rows.items() if k != folder})

    def _write(self, rows: dict[str, dict[str, object]]) -> None:
        data = json.dumps({"where": self._where, "checkpoints": rows}, indent=1).encode()
        try:
            with replacing(self._path) as fd:
                write_all(fd, memoryview(data))
        except OSError as error:
            raise not_written(self._path, error) from error
        self._rows = rows


def read_bytes(path: Path, limit: int) -> bytes:
    """A plain file of at most ``limit`` bytes, whole. Raises ``CheckpointError`` (``checkpoint-missing``, ``-damaged``,
    ``-unreadable``)."""
    try:
        fd = open_regular(path)
        with os.fdopen(fd, "rb") as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise CheckpointError(f"{path} is larger than {limit} bytes")
            return file.read(limit)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not there", code=MISSING) from None
    except OSError as error:
        raise not_read(path, error) from error
