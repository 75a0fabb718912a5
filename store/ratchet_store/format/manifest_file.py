"""Commit a checkpoint, by one rename of its sealed manifest, and read manifests back with checks. Also create the marker files
``FINISHED`` and ``CHANGED``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.checkpoint.manifest import Manifest, Sealer, open_manifest
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import (
    CHANGED_NAME,
    DELETED_MANIFEST_NAME,
    FINISHED_NAME,
    MANIFEST_NAME,
    parse_checkpoint_dir_name,
)
from ratchet_store.filesystem.durable_io import (
    DAMAGED,
    EXISTS,
    MISSING,
    NOT_WRITTEN,
    atomic_write,
    fsync_dir,
    open_regular,
    read_error,
    refresh,
    write_all,
    write_error,
)
from ratchet_store.format.manifest_structure import StructureCheck, check_structure
from ratchet_store.format.safetensors_header import refuse_json_bomb

MAX_MANIFEST_BYTES: Final = 256 << 20  # bytes; about a million tensors
MAX_MARKER_BYTES: Final = 4096  # bytes of the text in a marker file


class ManifestWriter:
    """Commits checkpoints one after another. If a manifest has the very same ``TensorEntry`` objects as the last one, its list of
    tensors is not checked and converted to JSON again."""

    def __init__(self) -> None:
        self._structure, self._sealer = StructureCheck(), Sealer()
        self._durable: set[Path] = set()  # job directories in which the name ``checkpoints`` is durable

    def commit(self, directory: Path, manifest: Manifest) -> Manifest:
        """Commit the checkpoint in ``directory`` by writing its manifest; returns the manifest with its digest. All rank files
        must exist with their sizes.

        The manifest is written as ``MANIFEST.json.tmp``, synced and renamed; then the directory, the directory of checkpoints
        and, the first time, the job's directory are synced. Committing the same manifest again is no error. Raises
        ``CheckpointError``: ``checkpoint-damaged`` if files or manifest are incomplete or inconsistent; ``checkpoint-exists``
        if there is another manifest, or this checkpoint is being deleted; ``checkpoint-unreadable`` if a file cannot be read;
        ``checkpoint-not-written`` if the system refuses a write or a sync. In the last case a new manifest is removed again, so
        that the step may be saved once more; if the system refuses that, too, the message says so, and the manifest stays.
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
            new = not _is_committed(directory, sealed)
            if new:
                _write_by_rename(path, raw)
            checkpoints, job = directory.parents[:2]
            fsync_dir(directory)
            fsync_dir(checkpoints)
            if job not in self._durable:  # another process may have created it without a sync
                fsync_dir(job)
                self._durable.add(job)
        except OSError as error:
            raise (_retract_manifest(path, error) if new else write_error(path, error)) from error
        return sealed


def mark_finished(directory: Path) -> None:
    """Create the marker file ``FINISHED`` durably, which says that the committed checkpoint in ``directory`` is its job's last.
    The manifest is not changed, since digests refer to it; ``read_manifest`` looks for the marker file. Calling it again is no
    error. Raises ``CheckpointError`` (``checkpoint-not-written``)."""
    path = directory / FINISHED_NAME
    try:
        path.touch()
        fsync_dir(directory)
    except OSError as error:
        raise write_error(path, error) from error


def mark_changed(directory: Path, description: str) -> bool:
    """Create the marker file ``CHANGED`` in ``directory`` durably and return True. Returns False, and changes nothing, if the
    file exists already, for example made by another rank.

    The marker says that state which the checkpoint should contain changed after the checkpoint was committed, so that a resume
    from it is not exact. ``description``: a sentence that names that state; it becomes the file's content. Raises
    ``CheckpointError`` (``checkpoint-not-written``); the marker may then exist, possibly without its text.
    """
    path = directory / CHANGED_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    except OSError as error:
        raise write_error(path, error) from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(description.encode())
            file.flush()
            os.fsync(fd)
        fsync_dir(directory)
    except OSError as error:
        raise write_error(path, error) from error
    return True


def read_changed_marker(directory: Path) -> str | None:
    """Return the sentence that ``mark_changed`` wrote for the checkpoint, up to ``MAX_MARKER_BYTES``; None if there is no
    marker file. For an empty marker file, which a crash may leave, a general sentence is returned. Raises ``CheckpointError``
    (``checkpoint-unreadable``, or ``checkpoint-damaged`` if the marker is no regular file)."""
    path = directory / CHANGED_NAME
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read(MAX_MARKER_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_error(path, error) from error
    return text or "state changed after checkpoint() in the same loop body"  # a crash came before the text was written


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a committed checkpoint, after checking its digest, its structure, and that it fits the
    directory's name. The rank files are not read. In the returned manifest ``finished`` is also True if ``mark_finished`` created
    the marker file ``FINISHED`` after the commit; the digest is that of the manifest file.

    Raises ``CheckpointError``: ``checkpoint-missing`` (not committed), ``checkpoint-damaged``, ``checkpoint-format`` (another
    format version), ``checkpoint-unreadable``.
    """
    path = directory / MANIFEST_NAME
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} holds no committed checkpoint: there is no {MANIFEST_NAME}", code=MISSING
        ) from None
    except OSError as error:
        raise read_error(path, error) from error
    with os.fdopen(fd, "rb") as file:
        try:
            if os.fstat(file.fileno()).st_size > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
            raw = file.read(MAX_MANIFEST_BYTES)
        except OSError as error:
            raise read_error(path, error) from error
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
    """Check that every rank file of the manifest exists with its size. The bytes are not read; ``verify_files`` does that.
    Raises ``CheckpointError``: ``checkpoint-damaged`` for a missing file or another size, ``checkpoint-unreadable`` if the
    system refuses."""
    for entry in manifest.files:
        path = f"{directory}/{entry.name}"
        try:
            size = os.lstat(path).st_size
        except OSError as error:
            raise read_error(Path(path), error) from error
        if size != entry.size:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {entry.size}", code=DAMAGED)


def checkpoint_dirs(checkpoints: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield ``(step, attempt, directory)`` of everything in ``checkpoints`` that is named like a checkpoint, committed or not,
    newest step and attempt first. Yields nothing if ``checkpoints`` does not exist.

    Raises ``CheckpointError`` (``checkpoint-unreadable``) when the directory cannot be listed; ``checkpoint-damaged`` if
    ``checkpoints`` is no directory.
    """
    refresh(checkpoints)
    try:
        found = [(parse_checkpoint_dir_name(path.name), path) for path in checkpoints.iterdir()]
    except FileNotFoundError:
        return
    except OSError as error:
        raise read_error(checkpoints, error) from error
    ids = [(parsed[0], parsed[1], path) for parsed, path in found if parsed is not None]
    yield from sorted(ids, reverse=True)


def _check_name(directory: Path, manifest: Manifest) -> None:
    """Check that the directory has the name of the manifest's checkpoint. Raises ``CheckpointError`` (``checkpoint-damaged``)."""
    if directory.name != manifest.id:
        raise CheckpointError(f"the manifest is of checkpoint {manifest.id}, the directory is named {directory.name}")


def _is_committed(directory: Path, sealed: Manifest) -> bool:
    """True if exactly this manifest is committed in the directory already. Raises ``CheckpointError`` (``checkpoint-exists``)
    if another one is."""
    if not (directory / MANIFEST_NAME).exists():
        return False
    there = read_manifest(directory)
    if there.digest != sealed.digest:
        raise CheckpointError(
            f"{directory} is already committed with digest {there.digest}: it is not replaced", code=EXISTS
        )
    return True


def _retract_manifest(path: Path, error: OSError) -> CheckpointError:
    """Remove a new manifest whose commit failed with ``error``, and return the error to raise.

    The manifest may have its name already, but is not known to be durable, so it must not be relied on. A second sync would
    prove nothing, since the system reports such an error only once. A loss of power may bring the manifest back, with all files
    that it lists: the checkpoint then counts as one that was committed but not yet reported.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as refused:
        reason = (
            f"checkpoint file {path} was renamed into place, but the system could not make the rename durable "
            f"({error.strerror or error}) or remove the file again ({refused.strerror or refused}): it does not count as saved, "
            "but a resume uses it if it is complete. Older checkpoints are untouched."
        )
        return CheckpointError(reason, code=NOT_WRITTEN)
    with suppress(OSError):  # the process that removes the rest syncs first
        fsync_dir(path.parent)
    return write_error(path, error)


def _write_by_rename(path: Path, raw: bytes) -> None:
    with atomic_write(path) as fd:
        write_all(fd, memoryview(raw))
