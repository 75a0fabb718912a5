"""Rewinds TensorBoard's event files to the step that an attempt begins with, so that each step is in them once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.checkpoint.resume_report import Base

_EVENTS: Final = "events.out.tfevents.*"


class EventFiles:
    """The event files that a job writes to ``directory`` and below it, and a journal of their sizes at each save. A file's name
    ends with the job's id and the attempt's number; other files are left alone.

    A ``purge_step`` would not do: it hides all events with this or a higher step, also those of a validation or of a logger that
    count steps in another way, and ``add_scalars`` writes files without it.
    """

    def __init__(self, directory: Path, job_id: str, attempt: int) -> None:
        self._directory, self._attempt = directory, attempt
        self._journal = directory / f".{job_id}.jsonl"
        self._name = re.compile(rf"\.{re.escape(job_id)}-a(\d+)$")
        self.suffix = f".{job_id}-a{attempt}"

    def rewind(self, base: Base) -> None:
        """Cut the files of earlier attempts to their sizes at ``base``; delete those that did not exist then. Call it before this
        attempt writes. Raises ``OSError``."""
        kept = self._sizes_at(base)
        sizes = {}
        for path in self._files():
            if self._attempt_of(path) == self._attempt:  # another writer of this attempt
                continue
            name = str(path.relative_to(self._directory))
            if name not in kept:
                path.unlink()
                continue
            sizes[name] = min(kept[name], path.stat().st_size)  # a power loss may have cut it
            os.truncate(path, sizes[name])
            fsync_path(path)
        self._add({"attempt": self._attempt, "step": base.step, "begins": True, "sizes": sizes})

    def record(self, step: int) -> None:
        """Record the sizes of this attempt's files, durably, after all events up to ``step`` are in them. Raises ``OSError``."""
        sizes = {}
        for path in self._files():
            if self._attempt_of(path) == self._attempt:
                fsync_path(path)
                sizes[str(path.relative_to(self._directory))] = path.stat().st_size
        self._add({"attempt": self._attempt, "step": step, "begins": False, "sizes": sizes})

    def _files(self) -> list[Path]:
        return [path for path in self._directory.rglob(_EVENTS) if self._name.search(path.name)]

    def _attempt_of(self, path: Path) -> int:
        found = self._name.search(path.name)
        assert found is not None
        return int(found[1])

    def _sizes_at(self, base: Base) -> dict[str, int]:
        """Return the files' sizes at ``base``, by relative path."""
        sizes: dict[str, int] = {}
        if base.attempt is None or not self._journal.exists():
            return sizes
        for line in self._journal.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # cut off by a kill
                continue
            entry = json.loads(line)
            if entry["attempt"] <= base.attempt and entry["step"] <= base.step:
                sizes = entry["sizes"] if entry["begins"] else sizes | entry["sizes"]
        return sizes

    def _add(self, entry: dict[str, Any]) -> None:
        """Append a line to the journal, durably."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._journal.open("a+b") as journal:
            if journal.tell() and os.pread(journal.fileno(), 1, journal.tell() - 1) != b"\n":
                os.ftruncate(journal.fileno(), _end_of_lines(self._journal))
            journal.write(json.dumps(entry).encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())


def _end_of_lines(path: Path) -> int:
    """Return the length of the file without a last line that was cut off."""
    return path.read_bytes().rfind(b"\n") + 1
