"""Single files, manifests and commits, by writers that are made for one alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet_contract.manifest import FileEntry, Manifest, Sealer, TensorEntry
from ratchet_store.commit import ManifestWriter
from ratchet_store.rankfile import Piece, RankWriter


def write_rank_file(
    directory: Path, rank: int, world_size: int, pieces: Sequence[Piece], state: Any
) -> tuple[FileEntry, list[TensorEntry]]:
    """The manifest's entries for it, in file order."""
    written = RankWriter(rank, world_size).write(directory, pieces, state)
    return written.file, list(written.tensors)


def seal(manifest: Manifest) -> tuple[Manifest, bytes]:
    return Sealer().seal(manifest)


def commit(directory: Path, manifest: Manifest) -> Manifest:
    return ManifestWriter().commit(directory, manifest)
