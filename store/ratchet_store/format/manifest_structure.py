"""Checks that a manifest describes a checkpoint at all, before it is sealed and before anything is read by it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Final

from ratchet_contract.checkpoint.manifest import (
    RANK_PREFIX,
    SHARED_PREFIX,
    FileEntry,
    Manifest,
    TensorEntry,
    same_entries,
)
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import rank_file_name
from ratchet_hooks.state.safetensors_header import ITEMSIZE, LENGTH_BYTES
from ratchet_store.format.safetensors_header import MAX_DIMENSIONS

_DIGEST: Final = re.compile("[0-9a-f]{32}")


def check_structure(manifest: Manifest) -> None:
    """Check that the manifest lists one valid file per rank, and each element of its tensors exactly once. Raise
    ``CheckpointError`` (``checkpoint-damaged``)."""
    StructureCheck().check(manifest)


class StructureCheck:
    """Checks manifests one after another. A list of tensors that equals the last valid one is only checked against the files'
    sizes."""

    def __init__(self) -> None:
        self._tensors: tuple[TensorEntry, ...] = ()
        self._file_ends: dict[str, int] = {}  # by file: end of its last tensor, in bytes

    def check(self, manifest: Manifest) -> None:
        """Check a manifest as ``check_structure`` does. Raises ``CheckpointError``."""
        _check_file_list(manifest)
        sizes = {file.name: file.size for file in manifest.files}
        if not self._is_already_checked(manifest, sizes):
            self._file_ends = _check_tensors(manifest, sizes)
            self._tensors = tuple(manifest.tensors)

    def _is_already_checked(self, manifest: Manifest, sizes: dict[str, int]) -> bool:
        """True if the tensors are those of the last valid manifest, and the files (``sizes``) are long enough for them."""
        return same_entries(manifest.tensors, self._tensors) and all(
            end <= sizes.get(file, -1) for file, end in self._file_ends.items()
        )


def _check_file_list(manifest: Manifest) -> None:
    """Check that the manifest has one file for each rank, with a digest per block. Raise ``CheckpointError``."""
    ranks = {file.rank: file.name for file in manifest.files}
    if (
        len(manifest.files) != manifest.world_size
        or len(ranks) != manifest.world_size
        or any(ranks.get(rank) != rank_file_name(rank, manifest.world_size) for rank in range(manifest.world_size))
    ):
        raise CheckpointError(f"the manifest does not list one file for each of {manifest.world_size} ranks")
    for file in manifest.files:
        _check_digests(manifest, file)


def _check_tensors(manifest: Manifest, sizes: dict[str, int]) -> dict[str, int]:
    """Check all tensors of the manifest. Returns, by file, the offset where its last tensor ends. Raises ``CheckpointError``."""
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    by_name: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.tensors:
        _check_entry(entry, sizes)
        by_file[entry.file].append(entry)
        by_name[entry.name].append(entry)
    for name, entries in by_file.items():
        _check_no_overlap(name, entries)
    for name, entries in by_name.items():
        _check_coverage(name, entries, manifest.world_size)
    return {file: max(entry.offset + entry.nbytes for entry in entries) for file, entries in by_file.items()}


def file_order(entries: list[TensorEntry]) -> list[TensorEntry]:
    """Return the entries of one file sorted by offset, at the same offset by size."""
    return sorted(entries, key=lambda e: (e.offset, e.nbytes))


def _check_digests(manifest: Manifest, file: FileEntry) -> None:
    """Check that a file's entry has one valid digest for each of its blocks. Raises ``CheckpointError``."""
    count = -(-file.size // file.block_size)
    if len(file.blocks) != count or not all(_DIGEST.fullmatch(digest) for digest in file.blocks):
        raise CheckpointError(f"the digests of {file.name!r} are not one for each of its blocks")


def _check_entry(entry: TensorEntry, sizes: dict[str, int]) -> None:
    """Check one piece by itself: its bytes must be whole elements inside its file (``sizes`` by name). Raise
    ``CheckpointError``."""
    if entry.file not in sizes:
        raise CheckpointError(f"tensor {entry.name!r} lies in {entry.file!r}, which is not a file of this checkpoint")
    if entry.dtype not in ITEMSIZE:
        raise CheckpointError(f"tensor {entry.name!r} has the unknown dtype {entry.dtype!r}")
    if len(entry.shape) > MAX_DIMENSIONS or any(n < 0 for n in entry.shape) or entry.start < 0:
        raise CheckpointError(f"tensor {entry.name!r} has an impossible shape or start")
    if entry.offset < LENGTH_BYTES or entry.offset + entry.nbytes > sizes[entry.file]:
        raise CheckpointError(f"tensor {entry.name!r} lies outside its file {entry.file}")
    if entry.nbytes % ITEMSIZE[entry.dtype]:
        raise CheckpointError(
            f"tensor {entry.name!r}: {entry.nbytes} bytes are no whole number of {entry.dtype} elements"
        )


def _check_no_overlap(file: str, entries: list[TensorEntry]) -> None:
    """Check that the pieces in one file do not overlap. Raises ``CheckpointError``."""
    end = 0
    for entry in file_order(entries):
        if entry.offset < end:
            raise CheckpointError(f"tensors overlap in {file} at {entry.name!r}")
        end = entry.offset + entry.nbytes


def _check_coverage(name: str, entries: list[TensorEntry], world_size: int) -> None:
    """Check that the pieces of one tensor contain each of its elements exactly once, and that its name is valid. A private
    tensor must be a single piece in its own rank's file. Raise ``CheckpointError``."""
    first = entries[0]
    if any(e.dtype != first.dtype or e.shape != first.shape for e in entries):
        raise CheckpointError(f"the pieces of tensor {name!r} differ in dtype or shape")
    position = 0
    for entry in sorted(entries, key=lambda e: e.start):
        if entry.start != position or (entry.nbytes == 0 and len(entries) > 1):
            raise CheckpointError(f"tensor {name!r} is not stored exactly once: element {min(position, entry.start)}")
        position += entry.nbytes // ITEMSIZE[entry.dtype]
    if position != math.prod(first.shape):
        raise CheckpointError(f"tensor {name!r} is not stored whole: {position} of {math.prod(first.shape)} elements")
    # a private tensor
    if name.startswith(RANK_PREFIX):
        rank = name.removeprefix(RANK_PREFIX).partition("/")[0]
        if (
            not rank.isascii()
            or not rank.isdigit()
            or first.file != rank_file_name(int(rank[:9]), world_size)
            or len(entries) > 1
        ):
            raise CheckpointError(f"private tensor {name!r} is not stored whole in its own rank's file")
    elif not name.startswith(SHARED_PREFIX):
        raise CheckpointError(f"tensor name {name!r} starts with neither {SHARED_PREFIX!r} nor {RANK_PREFIX!r}<rank>/")
