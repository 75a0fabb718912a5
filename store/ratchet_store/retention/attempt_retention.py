"""Retention by the attempt that saves: after a commit the attempt deletes surplus checkpoints that it wrote itself."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import (
    MANIFEST_NAME,
    PINNED_NAME,
    VERIFIED_NAME,
    JobPaths,
    checkpoint_dir_name,
    parse_checkpoint_dir_name,
)
from ratchet_contract.phases import NoteType
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_store.filesystem.durable_io import read_error
from ratchet_store.retention.delete import delete_unless_pinned
from ratchet_store.retention.rules import MIN_KEEP, Id, Rules

_RECHECKED_COUNT: Final = 8
"""Newest checkpoints that are checked again before older ones are deleted; the rest were whole when they were committed."""
_MAX_PENDING_VALUES: Final = 100_000
"""Maximum number of values that wait for their step to be saved."""
_MAX_OTHER_NAMES: Final = 10
"""Maximum number of names of other metrics in a note."""


class Retained(NamedTuple):
    """Result of ``Keeper.on_committed``. ``deleted``: step and attempt of the deleted checkpoints; ``notes``: type and text of
    messages for the user."""

    deleted: list[Id]
    notes: list[tuple[NoteType, str]]


@dataclass(frozen=True)
class _Own:
    """The facts of one of the attempt's checkpoints when it was committed. ``manifest``: inode, size and modification time of
    the manifest file. ``files``: paths and sizes of the rank files."""

    directory: Path
    manifest: tuple[int, int, int]
    files: tuple[tuple[str, int], ...]  # str: building a Path costs more than an lstat

    @classmethod
    def from_manifest(cls, directory: Path, manifest: Manifest) -> _Own:
        """Return the record of the committed checkpoint in ``directory``. Raises ``OSError``."""
        files = tuple((f"{directory}/{entry.name}", entry.size) for entry in manifest.files)
        return cls(directory, _identity(f"{directory}/{MANIFEST_NAME}"), files)

    def has_file(self, name: str) -> bool:
        """True if a file of that name exists in the checkpoint's directory."""
        return os.path.lexists(f"{self.directory}/{name}")

    def is_complete(self) -> bool:
        """True if the rank files still exist with their recorded sizes and the manifest file is unchanged."""
        try:
            return _identity(f"{self.directory}/{MANIFEST_NAME}") == self.manifest and all(
                os.lstat(path).st_size == size for path, size in self.files
            )
        except OSError:
            return False


class Keeper:
    """Deletes surplus checkpoints of one attempt, on the attempt's rank 0. ``protected``: checkpoints that are never deleted.
    One thread at a time may call ``on_committed``."""

    def __init__(self, checkpoints: Path, spec: CheckpointSpec, attempt: int, protected: Collection[Id] = ()) -> None:
        self._checkpoints, self._rules, self._attempt = checkpoints, Rules.from_spec(spec), attempt
        self._protected = frozenset(protected)
        self._fence_file = JobPaths(checkpoints.parent).attempt(attempt).fence_file
        self._own_checkpoints: dict[int, _Own] = {}
        self._first_step: int | None = None  # step of the save before the first scheduled one
        self._attempt_by_name: dict[str, int] = {}
        self._values = _Values(None if spec.keep_best is None else spec.keep_best.metric)
        self._reported: set[str] = set()

    def record_metric(self, step: int, values: Mapping[str, float]) -> None:
        """Record the value of ``keep_best``'s metric among ``values``, which rank 0 logged at ``step``."""
        self._values.put(step, values)

    def on_committed(self, manifest: Manifest) -> Retained:
        """Delete the attempt's checkpoints that no rule keeps after the commit of ``manifest``. Pinned and protected
        checkpoints are not deleted, nor is the newest verified one. Deletes nothing if a later attempt has a checkpoint, or if
        this attempt is fenced. An error is returned in ``notes``; each text is returned only once."""
        directory = self._checkpoints / checkpoint_dir_name(manifest.step, manifest.attempt)
        try:
            seen = _Own.from_manifest(directory, manifest)
            there = self._list_attempts()
        except OSError as error:
            return Retained([], self._new_notes([(NoteType.CHECKPOINT_NOT_DELETED, str(read_error(directory, error)))]))
        self._own_checkpoints[manifest.step] = seen
        if manifest.reason == "first":
            self._first_step = manifest.step
        # a zombie might delete the checkpoint that the later attempt started from
        if any(attempt > self._attempt for attempt in there.values()) or self._fence_file.exists():
            return Retained([], [])
        self._drop_missing(there)
        values = self._values.at_steps(self._own_checkpoints, manifest.step)
        return self._delete(self._surplus(values), values)

    def _list_attempts(self) -> dict[str, int]:
        """Return the attempt number of everything in the checkpoint directory that is named like a checkpoint, by name. Raises
        ``OSError``."""
        there: dict[str, int] = {}
        with os.scandir(self._checkpoints) as entries:
            for name in (entry.name for entry in entries):
                attempt = self._attempt_by_name.get(name)
                if attempt is None:
                    parsed = parse_checkpoint_dir_name(name)
                    if parsed is None:
                        continue
                    attempt = parsed[1]
                there[name] = attempt
        self._attempt_by_name = there
        return there

    def _drop_missing(self, present: Collection[str]) -> None:
        """Forget the attempt's checkpoints that are not among ``present``. Of the newest ``_RECHECKED_COUNT``, also forget
        those that are no longer complete."""
        for step in [step for step, own in self._own_checkpoints.items() if own.directory.name not in present]:
            del self._own_checkpoints[step]
        for step in sorted(self._own_checkpoints, reverse=True)[:_RECHECKED_COUNT]:
            if not self._own_checkpoints[step].is_complete():
                del self._own_checkpoints[step]

    def _surplus(self, values: Mapping[int, float]) -> list[int]:
        """Return the steps to delete unless pinned, newest first. ``values``: the metric by step. Also forgets older checkpoints
        that ``keep_every`` keeps permanently."""
        steps = sorted(self._own_checkpoints, reverse=True)
        pinned: set[Id] = set()
        free = 0
        for step in steps:
            # only up to keep_last unpinned ones: _delete checks the pins of the older ones
            if self._own_checkpoints[step].has_file(PINNED_NAME):
                pinned.add((step, self._attempt))
                continue
            free += step != self._first_step
            if free == max(self._rules.keep_last, MIN_KEEP):
                break
        by_id = {(step, self._attempt): value for step, value in values.items() if step != self._first_step}
        ids = [(step, self._attempt) for step in steps]
        first = [one for one in ids if one[0] == self._first_step]
        self._drop_permanent(ids[max(self._rules.keep_last, MIN_KEEP) :], self._rules.best_of(ids, by_id))
        found = [one[0] for one in self._rules.surplus(ids, by_id, pinned, first) if one not in self._protected]
        return [step for step in found if not self._is_last_verified(step, steps)]

    def _is_last_verified(self, step: int, steps: Iterable[int]) -> bool:
        """True if ``step`` is the newest of ``steps`` with the marker file ``VERIFIED``; forgotten checkpoints do not count."""

        def verified(one: int) -> bool:
            return self._own_checkpoints[one].has_file(VERIFIED_NAME)

        return verified(step) and not any(verified(one) for one in steps if one > step and one in self._own_checkpoints)

    def _drop_permanent(self, older: list[Id], best: Collection[Id]) -> None:
        """Forget the checkpoints among ``older`` that ``keep_every`` keeps permanently, unless they are among ``best``."""
        for one in older:
            # never deleted; remembering many of them would make every later call slower
            if self._rules.is_permanent(one) and one not in best:
                del self._own_checkpoints[one[0]]

    def _delete(self, steps: list[int], values: Mapping[int, float]) -> Retained:
        """Delete the unpinned checkpoints of ``steps``, oldest first. An error becomes a note. ``values``: the metric by step."""
        deleted: list[Id] = []
        notes: list[tuple[NoteType, str]] = []
        for step in reversed(steps):
            try:
                if delete_unless_pinned(self._own_checkpoints[step].directory):
                    deleted.append((step, self._attempt))
                    del self._own_checkpoints[step]
            except CheckpointError as error:
                notes.append((NoteType.CHECKPOINT_NOT_DELETED, error.detail))
        if deleted and self._rules.keep_best is not None and all(math.isnan(value) for value in values.values()):
            notes.append((NoteType.KEEP_BEST_UNKNOWN, self._values.missing_reason()))
        return Retained(deleted, self._new_notes(notes))

    def _new_notes(self, notes: Iterable[tuple[NoteType, str]]) -> list[tuple[NoteType, str]]:
        """Return the notes whose text was not returned before."""
        new = [note for note in notes if note[1] not in self._reported]
        self._reported.update(text for _, text in new)
        return new


class _Values:
    """The recorded values of one metric, by step. ``name``: the metric's name; None: nothing is recorded. Thread-safe."""

    def __init__(self, name: str | None) -> None:
        self._name, self._lock = name, threading.Lock()
        self._saved: dict[int, float] = {}
        self._pending: dict[int, float] = {}  # until it is known which steps are saved
        # The first ones, so that the text of ``missing_reason`` does not change with every save.
        self._logged_at: int | None = None
        self._nan_at: int | None = None  # among the saved steps
        self._other_names: dict[str, None] = {}

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metric's value that was logged at ``step``. If it was not logged, remember some other names for
        ``missing_reason``."""
        if self._name is None:
            return
        with self._lock:
            if self._name in values:
                self._pending[step] = float(values[self._name])
                self._logged_at = step if self._logged_at is None else self._logged_at
                if len(self._pending) > _MAX_PENDING_VALUES:
                    del self._pending[next(iter(self._pending))]
            elif len(self._other_names) < _MAX_OTHER_NAMES:
                self._other_names |= dict.fromkeys(list(values)[:_MAX_OTHER_NAMES])

    def at_steps(self, steps: Collection[int], newest: int) -> dict[int, float]:
        """Return the known values at ``steps``. Values of other steps up to ``newest``, the last commit's step, are forgotten."""
        with self._lock:
            known = {**self._saved, **self._pending}
            self._saved = {step: known[step] for step in steps if step in known}
            if self._nan_at is None:
                self._nan_at = min((step for step, value in self._saved.items() if math.isnan(value)), default=None)
            self._pending = {step: value for step, value in self._pending.items() if step > newest}
            return dict(self._saved)

    def missing_reason(self) -> str:
        """Return a text for the user on why no saved step has a value that counts."""
        begin = f"checkpoint.keep_best: no checkpoint is kept as one of the best by {self._name!r}"
        with self._lock:
            if self._logged_at is None:
                others = ", ".join(sorted(self._other_names)[:_MAX_OTHER_NAMES])
                found = f"; the logged metrics are {others}" if others else ""
                return f"{begin}: no metric of that name has been logged by rank 0{found}"
            if self._nan_at is not None:
                return f"{begin}: its value at step {self._nan_at} is NaN, which is never the best"
            return f"{begin}: it was logged at step {self._logged_at}, but at no step that was saved. Log it at those steps"


def _identity(path: str) -> tuple[int, int, int]:
    """Return inode, size and modification time in nanoseconds of a file. Raises ``OSError``."""
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
