"""Checkpoints made to harm, digests and all: the reader refuses them without running, blocking or allocating for them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED
from ratchet_store.read.checkpoint_reader import CheckpointReader, verify
from ratchet_store.read.find_base import find_base
from ratchet_store.retention.delete import sweep
from tests.support.checkpoints import make_chain, make_checkpoint, manifest_of, write_ranks
from tests.support.one_shot_writers import seal_manifest

STATE = {"__metadata__": {"state": "{}"}}


def forge(tmp_path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A committed checkpoint whose one rank file has this header; size and digests are right."""
    directory = tmp_path / checkpoint_dir_name(1, 1)
    files, _ = write_ranks(directory, world_size=1)
    raw = (len(header) if length is None else length).to_bytes(8, "little") + header + data
    (directory / files[0].name).write_bytes(raw)
    file = files[0].model_copy(
        update={"size": len(raw), "block_size": 1 << 30, "blocks": [xxhash.xxh3_128(raw).hexdigest()]}
    )
    (directory / MANIFEST_NAME).write_bytes(seal_manifest(manifest_of(1, 1, [file], []))[1])
    return directory


def test_forged_checkpoint_without_attack_passes_verification(tmp_path: Path) -> None:
    assert verify(forge(tmp_path, json.dumps(STATE).encode())).ok


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"[" + b"[]," * 5_000_000 + b"[]]",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"__metadata__":{"state":"{}"},"x":NaN}',
        b'{"__metadata__":{"state":' + b"9" * 10_000 + b"}}",
        json.dumps({"__metadata__": {"state": "[" * 100_000}}).encode(),
        json.dumps({"__metadata__": {"state": "[" + "[]," * 5_000_000 + "[]]"}}).encode(),
        json.dumps({"__metadata__": {"state": "NaN"}}).encode(),
        json.dumps({"__metadata__": {"state": {}}}).encode(),
        json.dumps({**STATE, "x": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}).encode(),
        json.dumps({**STATE, "x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode(),
        json.dumps({**STATE, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1, 2]}}).encode(),
        json.dumps({**STATE, "x": {"dtype": [], "shape": 3, "data_offsets": {}}}).encode(),
        json.dumps({**STATE, "x": {"dtype": "F32", "shape": [[]], "data_offsets": ["a", 1e400]}}).encode(),
        json.dumps({**STATE, "x": None}).encode(),
    ],
    ids=range(18),
)
def test_a_hostile_header_is_refused(tmp_path: Path, header: bytes) -> None:
    directory = forge(tmp_path, header)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not verify(directory).ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 3])
def test_an_impossible_header_length_is_refused(tmp_path: Path, length: int) -> None:
    assert not verify(forge(tmp_path, json.dumps(STATE).encode(), length=length)).ok


def test_trailing_bytes_outside_tensors_are_refused(tmp_path: Path) -> None:
    outcome = verify(forge(tmp_path, json.dumps(STATE).encode(), data=b"payload"))
    assert "7 bytes after the last tensor" in str(outcome.error)


def _reseal(directory: Path, change: Any) -> None:
    """Alter the manifest's JSON and give it a right digest again."""
    path = directory / MANIFEST_NAME
    data = json.loads(path.read_bytes())
    del data["digest"]
    change(data)
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    path.write_text(json.dumps({**data, "digest": hashlib.sha256(canonical).hexdigest()}))


def _set(*path: Any) -> Any:
    *parents, last, value = path

    def change(data: Any) -> None:
        for key in parents:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("files", 0, "name", "../../../../etc/passwd"),
        _set("files", 0, "name", "/etc/passwd"),
        _set("files", 0, "rank", -1),
        _set("world_size", 10**18),
        _set("world_size", "10"),
        _set("files", 0, "size", 1 << 50),
        _set("tensors", 0, "shape", [1 << 62] * 60),
        _set("tensors", 0, "shape", [1] * 10_000),
        _set("tensors", 0, "shape", [-1, -7]),
        _set("tensors", 0, "nbytes", 1 << 50),
        _set("tensors", 0, "offset", 9),
        _set("tensors", 0, "start", -4),
        _set("tensors", 0, "dtype", "OBJECT"),
        _set("tensors", 0, "file", "rank-00007-of-00008.safetensors"),
        _set("tensors", 0, "name", "rank/" + "9" * 5000 + "/x"),
        _set("step", -1),
        _set("environment", {"x": float("nan")}),
        _set("tensors", []),
        _set("unknown", 1),
    ],
    ids=range(19),
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, change: Any) -> None:
    directory = tmp_path / make_checkpoint(tmp_path, 1).id
    _reseal(directory, lambda data: None)
    assert verify(directory).ok
    _reseal(directory, change)
    with pytest.raises(CheckpointError) as caught:
        reader = CheckpointReader(directory)
        reader.tensors()
        reader.state(0)
    assert caught.value.code == DAMAGED
    assert not verify(directory).ok


def test_sizes_that_only_the_manifest_claims_are_not_allocated(tmp_path: Path) -> None:
    directory = tmp_path / make_checkpoint(tmp_path, 1, world_size=1).id

    def claim(data: Any) -> None:
        data["files"][0] |= {"size": 1 << 50, "block_size": 1 << 50}
        last = max(data["tensors"], key=lambda t: t["offset"])
        last["nbytes"] = 1 << 49
        last["shape"] = [(1 << 49) // {"F32": 4, "BF16": 2, "U8": 1, "I64": 8}[last["dtype"]]]

    _reseal(directory, claim)
    with pytest.raises(CheckpointError, match="bytes, the manifest says"):
        CheckpointReader(directory).tensors()


@pytest.mark.parametrize(
    "raw",
    [b"[" * 200_000, b"[" + b"[]," * 5_000_000 + b"[]]", b"", b"null", b"\xff", b'{"format_version":1,"a":"\\ud800"}'],
    ids=range(6),
)
def test_malformed_manifest_is_refused(tmp_path: Path, raw: bytes) -> None:
    directory = tmp_path / make_checkpoint(tmp_path, 1).id
    (directory / MANIFEST_NAME).write_bytes(raw)
    assert not verify(directory).ok


@pytest.mark.parametrize("name", [MANIFEST_NAME, "rank-00000-of-00002.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_non_regular_file_is_refused_without_blocking(tmp_path: Path, name: str, kind: str) -> None:
    directory = tmp_path / make_checkpoint(tmp_path, 1).id
    path = directory / name
    target = tmp_path / "elsewhere"
    path.rename(target)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(target)
    else:
        path.mkdir()
    outcome = verify(directory)
    assert not outcome.ok and "not a plain file" in str(outcome.error)


class Runs:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_stray_pickle_files_are_never_loaded(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path / "checkpoints", 1)
    directory = tmp_path / "checkpoints" / manifest.id
    bomb = pickle.dumps(Runs(tmp_path / "ran"))
    for name in (
        "optimizer.pt",
        ".metadata",
        "__0_0.distcp",
        "data.pkl",
        "rank-00000-of-00002.pt",
        "PINNED",
        "FINISHED",
    ):
        (directory / name).write_bytes(bomb)
        (directory.parent / name).write_bytes(bomb)
    assert verify(directory).ok
    lineage = [Segment(attempt=1, after_step=0)]
    found, moved = find_base(directory.parent, tmp_path / "aside", lineage)
    assert found is not None and (found.digest, moved) == (manifest.digest, [])
    reader = CheckpointReader(directory)
    assert reader.tensors() and reader.state(0) is not None
    assert sweep(directory.parent, dead_attempts={1}) == [] and not (tmp_path / "ran").exists()
    pickle.loads(bomb)  # noqa: S301  (the control)
    assert (tmp_path / "ran").exists()


_BOUNDED = """
import resource, sys
from pathlib import Path
from ratchet_contract.errors import CheckpointError
from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_store.object_store.upload_marker import Record
from ratchet_store.read.find_base import find_base
from ratchet_store.read.checkpoint_reader import verify
from ratchet_store.retention.delete import sweep
from tests.support.retention import run_retention
from tests.support.one_shot_writers import seal_manifest
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (512 << 20),) * 2)
checkpoints, lineage = Path(sys.argv[1]), [Segment(attempt=1, after_step=0)]
print([verify(path).ok for path in sorted(checkpoints.glob("step-*"))])
print(sweep(checkpoints, dead_attempts={1}), run_retention(checkpoints, keep_last=2, lineage=lineage))
print(Record(checkpoints / "UPLOADED.json", "x").ids())
print(find_base(checkpoints, checkpoints.parent / "aside", lineage)[0].step)
"""


def test_huge_sparse_files_take_no_memory(tmp_path: Path) -> None:
    """Sparse ones, in every place where something is read. The process may have half a GiB more than it begins with."""
    checkpoints = tmp_path / "checkpoints"
    manifests = make_chain(checkpoints, 1, 2, 3)
    places = [checkpoints / manifests[2].id / MANIFEST_NAME, checkpoints / "UPLOADED.json"]
    places += [checkpoints / manifests[1].id / "rank-00000-of-00002.safetensors"]
    places += [checkpoints / manifests[0].id / name for name in ("extra.safetensors", DELETED_MANIFEST_NAME)]
    for path in places:
        with path.open("ab") as file:
            file.truncate(1 << 40)
    command = [sys.executable, "-c", _BOUNDED, str(checkpoints)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:4] == ["[True, False, False]", "[] []", "[]", "1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("name", [MANIFEST_NAME, "rank-00000-of-00002.safetensors"])
def test_device_file_is_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / make_checkpoint(tmp_path, 1).id / name
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which has no end
    except PermissionError:
        pytest.skip("no devices here")
    outcome = verify(path.parent)
    assert not outcome.ok and "not a plain file" in str(outcome.error)
