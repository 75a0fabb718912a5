"""Single files, manifests and commits, by writers that are made for one alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ratchet_contract.checkpoint.manifest import FileEntry, Manifest, Sealer, TensorEntry
from ratchet_store.format.manifest_file import ManifestWriter
from ratchet_store.write.rank_file import Piece, RankWriter, file_order


class Given(NamedTuple):
    """A ``Piece`` with its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    data: Any


def layout_pieces(given: Sequence[Given]) -> tuple[list[Piece], bytes]:
    """Pieces in file order, and their bytes one behind the other."""
    sizes = [memoryview(one.data).nbytes for one in given]
    order = [given[i] for i in file_order([one.name for one in given], [one.dtype for one in given], sizes)]
    data = [bytes(memoryview(one.data)) for one in order]
    pieces = [Piece(*one[:4], len(its)) for one, its in zip(order, data, strict=True)]
    return pieces, b"".join(data)


def write_rank_file(
    directory: Path, rank: int, world_size: int, given: Sequence[Given], state: Any
) -> tuple[FileEntry, list[TensorEntry]]:
    """The manifest's entries for it, in file order."""
    written = RankWriter(rank, world_size).write(directory, *layout_pieces(given), state)
    return written.file, list(written.tensors)


def seal_manifest(manifest: Manifest) -> tuple[Manifest, bytes]:
    return Sealer().seal(manifest)


def commit(directory: Path, manifest: Manifest) -> Manifest:
    return ManifestWriter().commit(directory, manifest)
