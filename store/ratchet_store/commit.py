"""The last step of a checkpoint: the manifest, sealed, appears by one rename. Reading it back, checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import Manifest, Sealer, open_manifest
from ratchet_contract.paths import (
    CHANGED_NAME,
    DELETED_MANIFEST_NAME,
    FINISHED_NAME,
    MANIFEST_NAME,
    parse_checkpoint_dir_name,
)
from ratchet_store.files import (
    DAMAGED,
    EXISTS,
    MISSING,
    NOT_WRITTEN,
    fsync_dir,
    not_read,
    not_written,
    open_regular,
    refresh,
    replacing,
    write_all,
)
from ratchet_store.header import refuse_json_bomb
from ratchet_store.structure import StructureCheck, check_structure

MAX_MANIFEST: Final = 256 << 20  # bytes; about a million tensors
MAX_MARK: Final = 4096  # bytes of a sentence that a mark has


class ManifestWriter:
    """Commits one checkpoint after the other, and does not check and render a list of tensors again that is as in the last."""

    def __init__(self) -> None:
        self._structure, self._sealer = StructureCheck(), Sealer()
        self._durable: set[Path] = set()  # jobs' folders with their names of ``checkpoints``

    def commit(self, directory: Path, manifest: Manifest) -> Manifest:
        """Make the checkpoint in ``directory`` count; returns the sealed manifest.

        All rank files must be there with their sizes. ``MANIFEST.json.tmp`` -> fsync -> rename -> fsync of the directory, of
        ``checkpoints`` and, the first time, of the job's folder. Committing the same manifest again is fine. Raises
        ``CheckpointError``: incomplete or inconsistent (``checkpoint-damaged``), another manifest is there
        (``checkpoint-exists``), the system refuses (``checkpoint-not-written``): the manifest is taken away again then, where it
        had got its name, so that the step may be saved again.
        """
        _check_name(directory, manifest)
        self._structure.check(manifest)
        sealed, raw = self._sealer.seal(manifest)
        path = directory / MANIFEST_NAME
        check_files(directory, sealed)
        new = False
        try:
            if (directory / DELETED_MANIFEST_NAME).exists():
                raise CheckpointError(
                    f"{directory} is being deleted: save the step again under a new attempt", code=EXISTS
                )
            new = not _already(directory, sealed)
            if new:
                _write_by_rename(path, raw)
            checkpoints, job = directory.parents[:2]
            fsync_dir(directory)
            fsync_dir(checkpoints)
            if job not in self._durable:  # others made it, perhaps without a sync
                fsync_dir(job)
                self._durable.add(job)
        except OSError as error:
            raise (_taken_back(path, error) if new else not_written(path, error)) from error
        return sealed


def mark_finished(directory: Path) -> None:
    """The committed checkpoint in ``directory`` turned out to be its job's last. Its manifest stays as it is, since digests speak
    of it; ``read_manifest`` knows. Raises ``CheckpointError`` (``checkpoint-not-written``)."""
    path = directory / FINISHED_NAME
    try:
        path.touch()
        fsync_dir(directory)
    except OSError as error:
        raise not_written(path, error) from error


def mark_changed(directory: Path, what: str) -> bool:
    """State that the committed checkpoint in ``directory`` should have had changed behind it: ``what``, in a sentence. False: it
    is marked already, by another rank, say. Raises ``CheckpointError`` (``checkpoint-not-written``)."""
    path = directory / CHANGED_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    except OSError as error:
        raise not_written(path, error) from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(what.encode())
            file.flush()
            os.fsync(fd)
        fsync_dir(directory)
    except OSError as error:
        raise not_written(path, error) from error
    return True


def what_changed(directory: Path) -> str | None:
    """What ``mark_changed`` said of the checkpoint; None: nothing. Raises ``CheckpointError`` (``checkpoint-unreadable``)."""
    path = directory / CHANGED_NAME
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read(MAX_MARK).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise not_read(path, error) from error
    return text or "state changed behind checkpoint() in the same loop body"  # a crash came before the text


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a committed checkpoint, checked: own digest, structure, and that it belongs to this directory's name.
    ``finished`` is also what ``mark_finished`` said behind the commit, which the digest does not cover.

    Raises ``CheckpointError``: ``checkpoint-missing`` (not committed), ``-damaged``, ``-newer``, ``-unreadable``.
    """
    path = directory / MANIFEST_NAME
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} holds no committed checkpoint: there is no {MANIFEST_NAME}", code=MISSING
        ) from None
    except OSError as error:
        raise not_read(path, error) from error
    with os.fdopen(fd, "rb") as file:
        try:
            if os.fstat(file.fileno()).st_size > MAX_MANIFEST:
                raise CheckpointError(f"{path} is larger than {MAX_MANIFEST} bytes")
            raw = file.read(MAX_MANIFEST)
        except OSError as error:
            raise not_read(path, error) from error
    try:
        refuse_json_bomb(raw)
        manifest = open_manifest(raw)
        _check_name(directory, manifest)
        check_structure(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.detail}", code=error.code) from None
    if not manifest.finished and os.path.lexists(directory / FINISHED_NAME):
        return manifest.model_copy(update={"finished": True})
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Every rank file is there with its size (not its bytes: ``verify`` reads those). Raises ``CheckpointError``."""
    for entry in manifest.files:
        path = f"{directory}/{entry.name}"
        try:
            size = os.lstat(path).st_size
        except OSError as error:
            raise not_read(Path(path), error) from error
        if size != entry.size:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {entry.size}", code=DAMAGED)


def checkpoint_dirs(checkpoints: Path) -> Iterator[tuple[int, int, Path]]:
    """``(step, epoch, directory)`` of everything named like a checkpoint, newest step and epoch first; committed or not.

    Raises ``CheckpointError`` (``checkpoint-unreadable``) when the directory cannot be listed; a missing one is empty.
    """
    refresh(checkpoints)
    try:
        found = [(parse_checkpoint_dir_name(path.name), path) for path in checkpoints.iterdir()]
    except FileNotFoundError:
        return
    except OSError as error:
        raise not_read(checkpoints, error) from error
    ids = [(parsed[0], parsed[1], path) for parsed, path in found if parsed is not None]
    yield from sorted(ids, reverse=True)


def _check_name(directory: Path, manifest: Manifest) -> None:
    if directory.name != manifest.id:
        raise CheckpointError(f"the manifest is of checkpoint {manifest.id}, the directory is named {directory.name}")


def _already(directory: Path, sealed: Manifest) -> bool:
    """Is exactly this manifest committed already? Raises when another one is."""
    if not (directory / MANIFEST_NAME).exists():
        return False
    there = read_manifest(directory)
    if there.digest != sealed.digest:
        raise CheckpointError(
            f"{directory} is already committed with digest {there.digest}: it is not replaced", code=EXISTS
        )
    return True


def _taken_back(path: Path, error: OSError) -> CheckpointError:
    """What to raise where a new manifest may have its name, but ``error`` came before that was known to last. It must not be
    counted on, and a second sync would prove nothing, since the system tells such an error once; so the name goes again. A
    loss of power may bring it back, with all that it speaks of: what it was before its report."""
    try:
        path.unlink(missing_ok=True)
    except OSError as refused:
        reason = (
            f"checkpoint file {path} has its name, but the system would not say that this outlasts a loss of power "
            f"({error.strerror or error}), nor take it away again ({refused.strerror or refused}): it does not count as saved, "
            "though a resume takes it where it finds it whole. Older checkpoints are untouched."
        )
        return CheckpointError(reason, code=NOT_WRITTEN)
    with suppress(OSError):  # whoever removes the rest syncs first
        fsync_dir(path.parent)
    return not_written(path, error)


def _write_by_rename(path: Path, raw: bytes) -> None:
    with replacing(path) as fd:
        write_all(fd, memoryview(raw))
