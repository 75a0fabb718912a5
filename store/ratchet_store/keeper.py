"""Retention by the attempt that saves: after every commit what has become too many goes, and only what it wrote itself.

Called after each save of a job that may save at every step, so it remembers instead of reading: one listing of the directory,
a few ``lstat``, and the deletions themselves. What other attempts wrote is the service's to delete.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import Manifest
from ratchet_contract.paths import (
    MANIFEST_NAME,
    PINNED_NAME,
    VERIFIED_NAME,
    JobPaths,
    checkpoint_dir_name,
    parse_checkpoint_dir_name,
)
from ratchet_contract.spec_checkpoint import CheckpointSpec
from ratchet_store.files import not_read
from ratchet_store.keeping import MIN_KEEP, Id, Rules
from ratchet_store.retain import delete_unless_pinned

_LOOKED_AT: Final = 8
"""So many of the newest are looked at again before others are deleted for them; the rest were whole when they were committed."""
_WAITING: Final = 100_000
"""Most values that wait for their step to be saved."""
_OTHERS: Final = 10
"""Names of other metrics that a note may tell."""


class Retained(NamedTuple):
    """What a call did. ``notes``: type and sentence of what a user should know, each told once."""

    deleted: list[Id]
    notes: list[tuple[str, str]]


@dataclass(frozen=True)
class _Own:
    """One of the attempt's checkpoints as it was committed. ``files``: paths and sizes. Paths are plain text, since to put one
    together costs more than to look at what is there."""

    directory: Path
    manifest: tuple[int, int, int]
    files: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, directory: Path, manifest: Manifest) -> _Own:
        """As it is on the disk now. Raises ``OSError``."""
        files = tuple((f"{directory}/{entry.name}", entry.size) for entry in manifest.files)
        return cls(directory, _identity(f"{directory}/{MANIFEST_NAME}"), files)

    def has(self, name: str) -> bool:
        """Is a file of that name there?"""
        return os.path.lexists(f"{self.directory}/{name}")

    def whole(self) -> bool:
        """Are its files still there with their sizes, under the same manifest?"""
        try:
            return _identity(f"{self.directory}/{MANIFEST_NAME}") == self.manifest and all(
                os.lstat(path).st_size == size for path, size in self.files
            )
        except OSError:
            return False


class Keeper:
    """Of one attempt, on its rank 0. ``committed`` is called by one thread at a time, ``metric`` by any: it waits for no disk.

    ``protected``: never deleted, whatever the rules say. ``checkpoints``: the job's directory of them.
    The best are chosen among the attempt's own, so it may keep ``keep_best.count`` more than the rules of the whole job, which
    the service applies when the attempt has ended.
    """

    def __init__(self, checkpoints: Path, spec: CheckpointSpec, epoch: int, protected: Collection[Id] = ()) -> None:
        self._checkpoints, self._rules, self._epoch = checkpoints, Rules.of(spec), epoch
        self._protected = frozenset(protected)
        self._fence = JobPaths(checkpoints.parent).attempt(epoch).fence_file
        self._own: dict[int, _Own] = {}
        self._first: int | None = None  # step of the save before the first scheduled one
        self._names: dict[str, int] = {}
        self._values = _Values(None if spec.keep_best is None else spec.keep_best.metric)
        self._told: set[str] = set()

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        """What rank 0 logged at ``step``; the last value of a name counts."""
        self._values.put(step, values)

    def committed(self, manifest: Manifest) -> Retained:
        """The checkpoint of ``manifest`` has been committed, durably: delete what nothing keeps any more, oldest first.

        Deletes nothing when the attempt has been declared over, or a later one has left anything on the disk: the caller is a
        zombie, and may be deleting what the later one started from. Raises nothing: what the system refuses costs space, and is
        a note.
        """
        directory = self._checkpoints / checkpoint_dir_name(manifest.step, manifest.epoch)
        try:
            seen = _Own.of(directory, manifest)
            there = self._there()
        except OSError as error:
            return Retained([], self._notes([("checkpoint-not-deleted", str(not_read(directory, error)))]))
        self._own[manifest.step] = seen
        if manifest.reason == "first":
            self._first = manifest.step
        if any(epoch > self._epoch for epoch in there.values()) or self._fence.exists():
            return Retained([], [])
        self._forget(there)
        values = self._values.of(self._own, manifest.step)
        return self._delete(self._surplus(values), values)

    def _there(self) -> dict[str, int]:
        """The epoch of everything that is named like a checkpoint; names that were seen before are not parsed again."""
        there: dict[str, int] = {}
        with os.scandir(self._checkpoints) as entries:
            for name in (entry.name for entry in entries):
                epoch = self._names.get(name)
                if epoch is None:
                    parsed = parse_checkpoint_dir_name(name)
                    if parsed is None:
                        continue
                    epoch = parsed[1]
                there[name] = epoch
        self._names = there
        return there

    def _forget(self, there: Collection[str]) -> None:
        """What has gone (set aside, deleted by hand) or is not whole any more counts neither as kept nor as surplus."""
        for step in [step for step, own in self._own.items() if own.directory.name not in there]:
            del self._own[step]
        for step in sorted(self._own, reverse=True)[:_LOOKED_AT]:
            if not self._own[step].whole():
                del self._own[step]

    def _surplus(self, values: Mapping[int, float]) -> list[int]:
        """Newest first. Marks of pins are looked for until enough are found that have none."""
        steps = sorted(self._own, reverse=True)
        pinned: set[Id] = set()
        free = 0
        for step in steps:
            if self._own[step].has(PINNED_NAME):
                pinned.add((step, self._epoch))
                continue
            free += step != self._first
            if free == max(self._rules.last, MIN_KEEP):
                break
        by_id = {(step, self._epoch): value for step, value in values.items() if step != self._first}
        ids = [(step, self._epoch) for step in steps]
        first = [one for one in ids if one[0] == self._first]
        self._retire(ids[max(self._rules.last, MIN_KEEP) :], self._rules.best_of(ids, by_id))
        found = [one[0] for one in self._rules.surplus(ids, by_id, pinned, first) if one not in self._protected]
        return [step for step in found if not self._last_verified(step, steps)]

    def _last_verified(self, step: int, steps: Iterable[int]) -> bool:
        """Is it the newest of the attempt's whose every byte the service has read and found right?"""

        def verified(one: int) -> bool:
            return self._own[one].has(VERIFIED_NAME)

        return verified(step) and not any(verified(one) for one in steps if one > step and one in self._own)

    def _retire(self, older: list[Id], best: Collection[Id]) -> None:
        """What stays for good by its step needs no more looks, or a job of many steps would look at ever more of them."""
        for one in older:
            if self._rules.for_good(one) and one not in best:
                del self._own[one[0]]

    def _delete(self, steps: list[int], values: Mapping[int, float]) -> Retained:
        deleted: list[Id] = []
        notes: list[tuple[str, str]] = []
        for step in reversed(steps):
            try:
                if delete_unless_pinned(self._own[step].directory):
                    deleted.append((step, self._epoch))
                    del self._own[step]
            except CheckpointError as error:
                notes.append(("checkpoint-not-deleted", error.detail))
        if deleted and self._rules.best is not None and all(math.isnan(value) for value in values.values()):
            notes.append(("keep-best-unknown", self._values.why_none()))
        return Retained(deleted, self._notes(notes))

    def _notes(self, notes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        new = [note for note in notes if note[1] not in self._told]
        self._told.update(text for _, text in new)
        return new


class _Values:
    """Values of one metric by step. Any thread may call."""

    def __init__(self, name: str | None) -> None:
        self._name, self._lock = name, threading.Lock()
        self._saved: dict[int, float] = {}
        self._waiting: dict[int, float] = {}  # until it shows which steps are saved
        self._last: tuple[int, float] | None = None
        self._others: dict[str, None] = {}

    def put(self, step: int, values: Mapping[str, float]) -> None:
        if self._name is None:
            return
        with self._lock:
            if self._name in values:
                self._last = step, float(values[self._name])
                self._waiting[step] = self._last[1]
                if len(self._waiting) > _WAITING:
                    del self._waiting[next(iter(self._waiting))]
            elif len(self._others) < _OTHERS:
                self._others |= dict.fromkeys(list(values)[:_OTHERS])

    def of(self, steps: Collection[int], newest: int) -> dict[int, float]:
        """Values at ``steps``, of which ``newest`` was committed last: of steps before it no other is wanted any more."""
        with self._lock:
            known = {**self._saved, **self._waiting}
            self._saved = {step: known[step] for step in steps if step in known}
            self._waiting = {step: value for step, value in self._waiting.items() if step > newest}
            return dict(self._saved)

    def why_none(self) -> str:
        """In a sentence: no saved step has a value that counts."""
        begin = f"checkpoint.keep_best: no checkpoint is kept as one of the best by {self._name!r}"
        with self._lock:
            if self._last is None:
                others = ", ".join(sorted(self._others)[:_OTHERS])
                found = f"; what was logged is {others}" if others else ""
                return f"{begin}: no metric of that name has been logged by rank 0{found}"
            step, value = self._last
            if math.isnan(value):
                return f"{begin}: its value at step {step} is NaN, which is never the best"
            return f"{begin}: it was logged at step {step}, but at no step that was saved. Log it at those steps"


def _identity(path: str) -> tuple[int, int, int]:
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
