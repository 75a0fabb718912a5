"""The local directory of checkpoints, copied into an object store. Level-triggered: each call looks at what is committed here and
what is known to be there, and does one thing about the difference. Whoever is killed half-way leaves nothing that counts.

Taken away there is only what retention has let go of here: what this directory's own record says was copied from it, and is gone
from it. A directory that was lost took its record along, so nothing is deleted for it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import FileEntry, Manifest
from ratchet_contract.paths import CHANGED_NAME, FINISHED_NAME, MANIFEST_NAME, PINNED_NAME, checkpoint_dir_name
from ratchet_contract.resume import Segment, holds
from ratchet_store.commit import MAX_MANIFEST, MAX_MARK, checkpoint_dirs
from ratchet_store.copied import RECORD_NAME, Record, read_bytes
from ratchet_store.files import DAMAGED, not_read, open_regular
from ratchet_store.objects import DENIED, REMOTE
from ratchet_store.remote import QUARANTINED_MANIFEST, Id, RemoteCheckpoints, digest_of, is_whole

_MARKS: Final = (PINNED_NAME, FINISHED_NAME, CHANGED_NAME)
_CHUNK: Final = 4 << 20
_LOOK_AGAIN: Final = 600.0
"""Seconds after which the store is listed again: somebody may have deleted there."""
_RANK_FILE: Final = re.compile(r"rank-\d{5,}-of-(\d{5,})\.safetensors", re.ASCII)
_WAIT: Final = frozenset({REMOTE, DENIED})
"""Failures that concern every checkpoint; others are one's own, and the rest go on."""


class Uploaded(NamedTuple):
    """A checkpoint whose copy is whole. ``nbytes`` were sent for it now; none where it had been there."""

    manifest: Manifest
    uri: str
    nbytes: int
    seconds: float


class Failed(NamedTuple):
    """A checkpoint that cannot be copied, whatever the store does."""

    folder: str
    error: str


class Step(NamedTuple):
    """What one call did. ``idle``: there was nothing to do."""

    uploaded: Uploaded | None = None
    failed: Failed | None = None
    removed: Sequence[Id] = ()
    idle: bool = False


class Mirror:
    """Of one attempt, in one thread. ``lineage``: what may be resumed from; checkpoints of ``epoch``, the attempt's own, belong
    to it as well."""

    def __init__(
        self, remote: RemoteCheckpoints, checkpoints: Path, quarantine: Path, lineage: Sequence[Segment], epoch: int
    ) -> None:
        self._remote = remote
        self._checkpoints, self._quarantine = checkpoints, quarantine
        self._lineage, self._epoch = lineage, epoch
        self._there: dict[Id, dict[str, int]] | None = None
        self._listed = 0.0
        self._copied: dict[Id, Manifest] = {}
        self._hopeless: set[Id] = set()
        self._record = Record(checkpoints / RECORD_NAME, remote.objects.where)

    def pending(self) -> list[str]:
        """Names of committed checkpoints that have no whole copy yet, as far as is known; newest first."""
        return [checkpoint_dir_name(*one) for one in self._committed() if one not in self._copied]

    def step(self, interrupted: Callable[[], None] = lambda: None) -> Step:
        """Copy the newest checkpoint that is missing there, or else put marks right and take away what has gone here.

        ``interrupted`` is called again and again, and may raise. Raises ``CheckpointError``: ``checkpoint-remote``,
        ``-denied``, and where this disk fails.
        """
        try:
            return self._step(interrupted)
        except BaseException:
            self._there = None  # what was under way is not known
            raise

    def _step(self, interrupted: Callable[[], None]) -> Step:
        here = self._committed()
        todo = [one for one in here if one not in self._copied and one not in self._hopeless]
        if todo:
            return self._copy(todo[0], here[todo[0]], interrupted)
        if self._there is not None and time.monotonic() - self._listed > _LOOK_AGAIN:
            self._there, self._copied = None, {}
            return Step()
        marked = sum(self._mark(one, here[one]) for one in here if one in self._copied) > 0
        removed = self._remove_gone()
        return Step(removed=removed, idle=not (marked or removed))

    def _committed(self) -> dict[Id, Path]:
        """What may be copied: committed here, of the lineage or this attempt's own; newest first."""
        return {
            (step, epoch): directory
            for step, epoch, directory in checkpoint_dirs(self._checkpoints)
            if self._is_ours((step, epoch)) and (directory / MANIFEST_NAME).is_file()
        }

    def _is_ours(self, one: Id) -> bool:
        return one[1] == self._epoch or holds(self._lineage, *one)

    def _known(self) -> dict[Id, dict[str, int]]:
        """What is there. Asked once, and then remains of attempts that are over are swept."""
        if self._there is None:
            there = self._remote.listing()
            local = {(step, epoch) for step, epoch, _ in checkpoint_dirs(self._checkpoints)}
            for one, names in list(there.items()):
                if one[1] < self._epoch and one not in local and _is_orphan(names):
                    self._remote.remove(checkpoint_dir_name(*one), list(names))
                    del there[one]
            self._there, self._listed = there, time.monotonic()
        return self._there

    # --- there what is here ---

    def _copy(self, one: Id, directory: Path, interrupted: Callable[[], None]) -> Step:
        begin, folder = time.monotonic(), directory.name
        try:
            raw = read_bytes(directory / MANIFEST_NAME, MAX_MANIFEST)
            manifest = self._remote.parse(folder, raw)
            nbytes = self._send(one, directory, manifest, raw, interrupted)
        except CheckpointError as error:
            if error.code in _WAIT:
                raise
            if not (directory / MANIFEST_NAME).exists():  # retention took it meanwhile
                self._give_up(one)
                return Step()
            self._hopeless.add(one)
            return Step(failed=Failed(folder, error.detail))
        self._copied[one] = manifest
        self._record.add(folder, manifest.digest, pinned=(directory / PINNED_NAME).exists())
        uri = f"{self._remote.objects.where}/{folder}"
        return Step(uploaded=Uploaded(manifest, uri, nbytes, time.monotonic() - begin))

    def _send(self, one: Id, directory: Path, manifest: Manifest, raw: bytes, interrupted: Callable[[], None]) -> int:
        """Returns the bytes sent. Whatever is there with the right size and digest is left alone."""
        objects, folder = self._remote.objects, directory.name
        names = self._known().setdefault(one, {})
        nbytes = 0
        if MANIFEST_NAME in names and is_whole(manifest, names):
            self._remote.commit(folder, raw, manifest.digest)  # compares
            return 0
        doubted = QUARANTINED_MANIFEST in names  # their bytes were wrong, whatever size and digest they tell
        for entry in manifest.files:
            interrupted()
            path, digest = f"{folder}/{entry.name}", digest_of(entry)
            if not doubted and names.get(entry.name) == entry.size and objects.head(path).digest == digest:
                continue
            objects.put(path, _verified(directory / entry.name, entry, interrupted), entry.size, digest)
            names[entry.name] = entry.size
            nbytes += entry.size
        for mark in _MARKS:
            if (directory / mark).exists():
                objects.put_if_absent(f"{folder}/{mark}", _text_of(directory, mark))
                names[mark] = 0
        self._remote.commit(folder, raw, manifest.digest)
        names[MANIFEST_NAME] = len(raw)
        if doubted:
            objects.delete([f"{folder}/{QUARANTINED_MANIFEST}"])
            del names[QUARANTINED_MANIFEST]
        return nbytes + len(raw)

    def _give_up(self, one: Id) -> None:
        """Data without a manifest, of a checkpoint that is gone here: nobody will complete it."""
        names = self._known().pop(one, {})
        if names and MANIFEST_NAME not in names:
            self._remote.remove(checkpoint_dir_name(*one), list(names))

    def _mark(self, one: Id, directory: Path) -> bool:
        """``_MARKS`` as they are here; they come and go behind the commit."""
        names, changed = self._known().setdefault(one, {}), False
        for mark in _MARKS:
            here = (directory / mark).exists()
            if here == (mark in names) or not directory.is_dir():
                continue
            path = f"{directory.name}/{mark}"
            if here:
                self._remote.objects.put_if_absent(path, _text_of(directory, mark))
                names[mark] = 0
            else:
                self._remote.objects.delete([path])
                del names[mark]
            changed = True
        if changed:
            self._record.add(directory.name, self._copied[one].digest, pinned=PINNED_NAME in names)
        return changed

    # --- and what is not ---

    def _remove_gone(self) -> list[Id]:
        """Copies of what retention has deleted here: not the newest whole one of the lineage there, not what was pinned."""
        gone = [one for one in self._record.ids() if self._is_gone(one)]
        if not gone:
            return []
        there = self._known()
        whole = [
            one
            for one, names in there.items()
            if self._is_ours(one) and MANIFEST_NAME in names and not _is_orphan(names)
        ]
        newest = max(whole, default=None)
        removed: list[Id] = []
        for one in gone:
            names = there.get(one, {})
            if one == newest or self._record.pinned(one) or PINNED_NAME in names:
                continue
            folder = checkpoint_dir_name(*one)
            try:
                if names:
                    self._remote.remove(folder, list(names))
                    there.pop(one)
                self._record.drop(folder)
            except CheckpointError:
                if not removed:
                    raise
                self._there = None
                break  # what is gone is told now; the next call meets the failure
            self._copied.pop(one, None)
            removed.append(one)
        return removed

    def _is_gone(self, one: Id) -> bool:
        """Its directory is; one whose manifest alone is away may get it back. What lies in quarantine was not let go of."""
        folder = checkpoint_dir_name(*one)
        return not os.path.lexists(self._checkpoints / folder) and not any(self._quarantine.glob(f"{folder}*"))


def _text_of(directory: Path, mark: str) -> bytes:
    """The others are empty."""
    return read_bytes(directory / mark, MAX_MARK) if mark == CHANGED_NAME else b""


def _is_orphan(names: dict[str, int]) -> bool:
    """No checkpoint, and none that was set aside: data without a manifest, or a manifest whose data were swept."""
    if QUARANTINED_MANIFEST in names:
        return False
    files = [match for name in names if (match := _RANK_FILE.fullmatch(name)) is not None]
    return MANIFEST_NAME not in names or not files or len(files) != int(files[0][1])


def _verified(path: Path, entry: FileEntry, interrupted: Callable[[], None]) -> Iterator[bytes]:
    """The bytes of a rank file, each block compared with its digest before its last part is given on."""
    block, digests = entry.block_size, entry.blocks
    try:
        fd = open_regular(path)
    except OSError as error:
        raise not_read(path, error) from error
    with os.fdopen(fd, "rb", buffering=0) as file:
        for number, digest in enumerate(digests):
            left = min(block, entry.size - number * block)
            hasher = xxhash.xxh3_128()
            while left > 0:
                interrupted()
                try:
                    data = file.read(min(left, _CHUNK))
                except OSError as error:
                    raise not_read(path, error) from error
                hasher.update(data)
                left -= len(data)
                if not data or (left == 0 and hasher.hexdigest() != digest):
                    raise CheckpointError(
                        f"{path}: block {number} is not what was saved: the copy on this disk is damaged", code=DAMAGED
                    )
                yield data
