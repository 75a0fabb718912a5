"""Rewinds TensorBoard's event files to the step that an attempt begins with, so that each step is in them once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from threading import Thread
from typing import Any, Final, Protocol

from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_worker.ipc import event_journal

_THREADS: Final = 16


class Writer(Protocol):
    """What writes to event files."""

    def flush(self) -> None: ...


class EventFiles:
    """The event files that a job writes to ``directory`` and below it, and a journal of their sizes at each save. A file's name
    ends with the job's id and the attempt's number; other files are left alone, and so are directories with a journal of their
    own. ``writers``: those of this attempt.

    A ``purge_step`` would not do: it hides all events with this or a higher step, also those of a validation or of a logger that
    count steps in another way, and ``add_scalars`` writes files without it.
    """

    def __init__(self, directory: Path, job_id: str, attempt: int) -> None:
        self._directory, self._attempt = directory, attempt
        self.journal = directory / f".{job_id}.jsonl"
        self._name = re.compile(rf"events\.out\.tfevents\..*\.{re.escape(job_id)}-a(\d+)")
        self.suffix = f".{job_id}-a{attempt}"
        self.writers: list[Writer] = []

    def open(self) -> int:
        """Record that this attempt writes, before it does. Return the number of files of attempts that the journal, which may
        be lost, does not know: they are left alone. Raises ``OSError``."""
        begun = {entry["attempt"] for entry in self._entries()}
        self._add({"attempt": self._attempt, "step": 0, "begins": False, "sizes": {}})
        return sum(attempt not in begun for _, attempt in self._files())

    def rewind(self, base: Base) -> None:
        """Cut the files of earlier attempts to their sizes at ``base``; delete those that did not exist then. A user's copies of
        files that the journal knows are left alone. Call it once it is certain that the attempt trains from ``base``. Raises
        ``OSError``."""
        entries = self._entries()
        kept, sizes = _sizes_at(entries, base), {}
        begun = {entry["attempt"] for entry in entries} - {self._attempt}
        known = {name for entry in entries for name in entry["sizes"]}
        originals = {PurePath(name).name for name in known}
        for path, attempt in [*self._files()]:
            name = str(path.relative_to(self._directory))
            if attempt not in begun:
                continue
            if name in kept:
                sizes[name] = min(kept[name], path.stat().st_size)  # a power loss may have cut it
                os.truncate(path, sizes[name])
                fsync_path(path)
            elif name in known or path.name not in originals:
                path.unlink()
        self._add({"attempt": self._attempt, "step": base.step, "begins": True, "sizes": sizes})

    def store(self, step: int) -> None:
        """Store all events up to ``step``, and record the sizes of this attempt's files then, durably. Raises ``OSError``."""
        self.flush()
        self.record(step)

    def flush(self) -> None:
        """Write all events to the files, without a sync. Raises ``OSError``."""
        for writer in self.writers:
            writer.flush()

    def record(self, step: int) -> None:
        """Record the sizes of this attempt's files as those at ``step``, durably. Raises ``OSError``."""
        _sync([path for path, attempt in self._files() if attempt == self._attempt])
        self._add(self.entry(step))

    def entry(self, step: int) -> dict[str, Any]:
        """Return the journal's entry with the present sizes of this attempt's files as those at ``step``. Raises ``OSError``."""
        paths = [path for path, attempt in self._files() if attempt == self._attempt]
        sizes = {str(path.relative_to(self._directory)): path.stat().st_size for path in paths}
        return {"attempt": self._attempt, "step": step, "begins": False, "sizes": sizes}

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yield each file with the number of its attempt."""
        # not Path.rglob, which fails if another thread deletes a directory at that moment, such as an old checkpoint
        for folder, below, files in os.walk(self._directory):
            if self.journal.name in files and Path(folder) != self._directory:
                below.clear()
                continue
            for name in files:
                if (found := self._name.fullmatch(name)) is not None:
                    yield Path(folder, name), int(found[1])

    def _entries(self) -> list[dict[str, Any]]:
        """Return the lines of the journal; without a last one that a kill has cut off."""
        if not self.journal.exists():
            return []
        lines = self.journal.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _add(self, entry: dict[str, Any]) -> None:
        """Append a line to the journal, durably."""
        event_journal.append(self.journal, entry)


def _sync(paths: list[Path]) -> None:
    """Sync the files at once: one after the other takes milliseconds for each, and ``add_scalars`` makes many. Raises
    ``OSError``."""
    errors = list[OSError]()

    def sync(some: list[Path]) -> None:
        try:
            for path in some:
                fsync_path(path)
        except OSError as error:
            errors.append(error)

    # A ThreadPoolExecutor takes no work once the main thread has ended, and another thread of the script may still train.
    threads = [Thread(target=sync, args=(paths[first::_THREADS],)) for first in range(min(len(paths), _THREADS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _sizes_at(entries: list[dict[str, Any]], base: Base) -> dict[str, int]:
    """Return the files' sizes at ``base``, by relative path."""
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry["attempt"] <= (base.attempt or 0) and entry["step"] <= base.step:
            sizes = entry["sizes"] if entry["begins"] else sizes | entry["sizes"]
    return sizes
