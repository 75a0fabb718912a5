"""Change one part of a committed checkpoint and commit it again with right digests: for controls that must end differently."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.checkpoint_reader import read_state
from tests.support.one_shot_writers import Given, commit, write_rank_file

Pieces = dict[str, bytearray]
States = dict[int, Any]


def tamper(directory: Path, change: Callable[[Pieces, States], None]) -> None:
    """Rewrite the checkpoint at ``directory`` after ``change(pieces, states)``.

    ``pieces`` maps ``name`` (or ``name#start`` for a slice) to the stored bytes, ``states`` ranks to their JSON state; both are
    changed in place.
    """
    manifest = read_manifest(directory)
    entries = {t.name if t.start == 0 else f"{t.name}#{t.start}": t for t in manifest.tensors}
    raw = {f.name: (directory / f.name).read_bytes() for f in manifest.files}
    pieces: Pieces = {key: bytearray(raw[t.file][t.offset : t.offset + t.nbytes]) for key, t in entries.items()}
    states = {f.rank: read_state(directory, manifest, f.rank) for f in manifest.files}
    change(pieces, states)
    shutil.rmtree(directory)
    written = [
        write_rank_file(
            directory,
            f.rank,
            manifest.world_size,
            [
                Given(t.name, t.dtype, tuple(t.shape), t.start, pieces[key])
                for key, t in entries.items()
                if t.file == f.name
            ],
            states[f.rank],
        )
        for f in manifest.files
    ]
    files = [file for file, _ in written]
    tensors = [entry for _, found in written for entry in found]
    commit(directory, manifest.model_copy(update={"files": files, "tensors": tensors}))
