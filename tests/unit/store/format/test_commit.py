"""The manifest makes a checkpoint count; loading gives back every byte, whole or straight into live memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.manifest import Manifest, TensorEntry
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED, EXISTS, MISSING
from ratchet_store.format.manifest_file import mark_finished, read_manifest
from ratchet_store.read.checkpoint_reader import CheckpointReader, load, read_state, verify
from ratchet_store.write import rank_file
from tests.support.checkpoints import SHAPES, make_checkpoint, manifest_of, shared_bytes, write_ranks
from tests.support.one_shot_writers import commit


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_committed_checkpoint_reads_back_completely(tmp_path: Path, world_size: int) -> None:
    manifest = make_checkpoint(tmp_path, 7, 3, world_size=world_size, seed=5)
    reader = CheckpointReader(tmp_path / manifest.id)
    assert reader.manifest == manifest
    tensors = reader.tensors("shared/")
    assert {name: bytes(tensor.data) for name, tensor in tensors.items()} == shared_bytes(5)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        name: (dtype, shape) for name, (dtype, shape, _) in SHAPES.items()
    }
    last = world_size - 1
    assert set(reader.tensors([f"rank/{last}/rng/torch"])) == {f"rank/{last}/rng/torch"}
    assert reader.state(last) == {"rank": last, "seed": 5}
    assert verify(tmp_path / manifest.id) == (True, None, manifest.size)
    with pytest.raises(CheckpointError, match="no tensor 'shared/x'") as caught:
        reader.tensors(["shared/x"])
    assert caught.value.code == MISSING


def test_load_reads_and_verifies_only_needed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ranks, 3 blocks in each file: the header's, then what is shared, then what is private (with the tail of the shared)."""
    monkeypatch.setattr(rank_file, "BLOCK", 4096)
    manifest = make_checkpoint(tmp_path, 7, seed=1, scale=6)
    directory, (mine, other) = tmp_path / manifest.id, manifest.files
    assert [len(file.blocks) for file in manifest.files] == [3, 3]
    private = next(e for e in manifest.tensors if e.name == "rank/1/rng/torch")
    assert private.offset // 4096 == 2
    shared = [e.offset + e.nbytes for e in manifest.tensors if e.file == other.name and e is not private]
    names = {"shared/model/weight", "rank/0/rng/torch"}
    seen: list[int] = []
    loaded = load(directory, manifest, lambda e: e.name in names, complete_ranks=(0,), progress=seen.append)
    assert loaded.bytes_read == sum(seen) == mine.size + (other.size if max(shared) > 8192 else 8192)
    assert load(directory, manifest, lambda _: False, ranks=(1,)).bytes_read == 4096
    assert load(directory, manifest, lambda e: e is private).bytes_read == 4096 + other.size - 8192

    path = directory / other.name
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    assert read_state(directory, manifest, 1) == {"rank": 1, "seed": 1}  # it does not lie there
    for wanted, whole in [(names, ()), (set(), (1,))]:
        with pytest.raises(CheckpointError, match=r"in block 1 \(bytes 4096 to 8191\)") as caught:
            load(directory, manifest, lambda e, wanted=wanted: e.name in wanted, complete_ranks=whole)
        assert caught.value.code == DAMAGED
    assert "block 1" in str(verify(directory).error)


@pytest.mark.parametrize("change", [{"blocks": []}, {"block_size": 8192}])
def test_commit_with_block_digests_not_covering_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    directory = tmp_path / checkpoint_dir_name(4, 2)
    files, tensors = write_ranks(directory, scale=12)
    assert files[0].size > 8192
    files[1] = files[1].model_copy(update=change)
    with pytest.raises(CheckpointError, match="are not one for each of its blocks"):
        commit(directory, manifest_of(4, 2, files, tensors))


def test_load_into_live_memory_reads_each_file_once(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, 7, world_size=3, seed=1)
    live = {name: bytearray(len(data)) for name, data in shared_bytes(1).items()}

    def into(entry: TensorEntry) -> memoryview | None:
        if entry.name not in live:
            return None
        begin = entry.start * SHAPES[entry.name][2]
        return memoryview(live[entry.name])[begin : begin + entry.nbytes]

    loaded = load(
        tmp_path / manifest.id, manifest, lambda e: e.name.startswith(("shared/", "rank/1/")), into, ranks=(1,)
    )  # fmt: skip
    assert {name: bytes(data) for name, data in live.items()} == shared_bytes(1)
    assert [entry.name for entry, _ in loaded.pieces] == ["rank/1/rng/torch"]
    assert loaded.bytes_read == manifest.size and loaded.states[1] == {"rank": 1, "seed": 1}
    only = load(tmp_path / manifest.id, manifest, lambda e: e.name == "rank/2/rng/torch")
    assert only.bytes_read == manifest.files[2].size and list(only.states) == [2]
    assert read_state(tmp_path / manifest.id, manifest, 0) == {"rank": 0, "seed": 1}


@pytest.mark.parametrize("target", [memoryview(bytearray(3)), memoryview(bytes(24))])
def test_load_into_wrong_buffer_is_refused(tmp_path: Path, target: memoryview) -> None:
    manifest = make_checkpoint(tmp_path, 7, world_size=1)
    with pytest.raises(ValueError, match="need a writable buffer of 24 bytes"):
        load(tmp_path / manifest.id, manifest, lambda e: e.name.startswith("rank/0/"), lambda _: target)


def _ready(tmp_path: Path) -> tuple[Path, Manifest]:
    directory = tmp_path / checkpoint_dir_name(4, 2)
    return directory, manifest_of(4, 2, *write_ranks(directory))


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    directory, _ = _ready(tmp_path)
    with pytest.raises(CheckpointError, match="no committed checkpoint") as caught:
        read_manifest(directory)
    assert caught.value.code == MISSING


def test_commit_is_idempotent_but_refuses_different_manifest(tmp_path: Path) -> None:
    directory, manifest = _ready(tmp_path)
    first = commit(directory, manifest)
    assert commit(directory, manifest) == first == read_manifest(directory)
    with pytest.raises(CheckpointError, match="already committed") as caught:
        commit(directory, manifest.model_copy(update={"created": "later"}))
    assert caught.value.code == EXISTS
    assert read_manifest(directory) == first
    mark_finished(directory)
    assert read_manifest(directory) == first.model_copy(update={"finished": True}) and verify(directory).ok
    assert commit(directory, manifest) == first  # the mark is none of the manifest


@pytest.mark.parametrize("fault", ["missing", "short", "rank", "coverage", "name", "outside", "private", "prefix"])
def test_an_incomplete_or_inconsistent_checkpoint_is_not_committed(tmp_path: Path, fault: str) -> None:
    directory, manifest = _ready(tmp_path)
    path = directory / manifest.files[1].name
    tensors = list(manifest.tensors)
    if fault == "missing":
        path.unlink()
    elif fault == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "rank":
        manifest = manifest.model_copy(update={"files": manifest.files[:1]})
    elif fault == "coverage":
        tensors.pop(next(i for i, t in enumerate(tensors) if t.name == "shared/model/weight" and t.start))
    elif fault == "name":
        manifest = manifest.model_copy(update={"step": 5})
    elif fault == "outside":
        tensors[0] = tensors[0].model_copy(update={"offset": 1 << 40})
    else:
        i = next(i for i, t in enumerate(tensors) if t.name == "rank/1/rng/torch")
        new = "rank/0/rng/else" if fault == "private" else "weights"
        tensors[i] = tensors[i].model_copy(update={"name": new})
    with pytest.raises(CheckpointError):
        commit(directory, manifest.model_copy(update={"tensors": tensors}))
    assert not (directory / MANIFEST_NAME).exists()
