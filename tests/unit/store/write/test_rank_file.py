"""A rank file is a valid safetensors file; what cannot be stored unchanged is refused by name when it is saved."""

from __future__ import annotations

import array
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import xxhash
from safetensors.torch import _TYPES

from ratchet_contract.errors import CheckpointError, StateError
from ratchet_hooks.state.safetensors_header import ITEMSIZE
from ratchet_store.filesystem.durable_io import EXISTS, NOT_WRITTEN
from ratchet_store.format.json_state import encode_state
from ratchet_store.format.safetensors_header import ALIGNMENT
from ratchet_store.write import rank_file
from ratchet_store.write.block_writer import BLOCK, CHUNK
from tests.support.checkpoints import list_names, make_checkpoint
from tests.support.one_shot_writers import Given, write_rank_file


def test_safetensors_reads_whole_tensors_by_name_and_slices_by_start(tmp_path: Path) -> None:
    half = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    pieces = [
        Given("rank/0/half", "BF16", (3, 4), 0, half.view(torch.uint8).numpy().reshape(-1)),
        Given("shared/w", "F32", (10,), 4, array.array("f", [4, 5, 6])),
        Given("shared/scalar", "I64", (), 0, array.array("q", [7]).tobytes()),
        Given("shared/empty", "F32", (0, 3), 0, b""),
    ]
    file, entries = write_rank_file(tmp_path / "step", 0, 2, pieces, {"épée": [1, None, "\ud800", True, 0.1]})
    path = tmp_path / "step" / file.name
    assert file.name == "rank-00000-of-00002.safetensors"
    with safetensors.safe_open(path, "pt") as opened:
        assert torch.equal(opened.get_tensor("rank/0/half"), half)
        assert opened.get_tensor("shared/w#4").tolist() == [4.0, 5.0, 6.0]
        assert opened.get_tensor("shared/scalar").item() == 7 and opened.get_tensor("shared/scalar").shape == ()
        assert opened.get_tensor("shared/empty").shape == (0, 3)
        assert json.loads(opened.metadata()["state"]) == {"épée": [1, None, "\ud800", True, 0.1]}
    raw = path.read_bytes()
    assert (file.size, file.block_size, file.blocks) == (len(raw), BLOCK, [xxhash.xxh3_128(raw).hexdigest()])
    assert (8 + int.from_bytes(raw[:8], "little")) % ALIGNMENT == 0
    stored = {entry.name: raw[entry.offset : entry.offset + entry.nbytes] for entry in entries}
    assert stored["shared/w"] == array.array("f", [4, 5, 6]).tobytes()
    assert all(entry.offset % ITEMSIZE[entry.dtype] == 0 for entry in entries)
    assert list_names(tmp_path / "step") == [file.name]


def test_every_dtype_of_safetensors_comes_back(tmp_path: Path) -> None:
    pieces = [
        Given(f"rank/0/{name}", name, (3,), 0, bytes(range(3 * ITEMSIZE[name]))) for name in _TYPES if name != "BOOL"
    ]
    pieces.append(Given("rank/0/BOOL", "BOOL", (3,), 0, b"\0\1\0"))
    file, _ = write_rank_file(tmp_path, 0, 1, pieces, None)
    with safetensors.safe_open(tmp_path / file.name, "pt") as opened:
        for piece in pieces:
            tensor = opened.get_tensor(piece.name)
            assert tensor.dtype == _TYPES[piece.dtype]
            assert tensor.view(torch.uint8).numpy().tobytes() == piece.data


def blocks_of(raw: bytes, size: int) -> list[str]:
    """The digests as a reader without this package would make them."""
    return [xxhash.xxh3_128(raw[begin : begin + size]).hexdigest() for begin in range(0, len(raw), size)]


def test_rank_file_with_many_buffers_and_blocks_is_written_correctly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_file, "BLOCK", CHUNK)
    big = np.random.default_rng(0).integers(0, 256, 5 << 20, dtype=np.uint8)
    pieces = [Given(f"rank/0/{i}", "U8", (3,), 0, bytes([i % 256] * 3)) for i in range(1500)]
    pieces.insert(700, Given("rank/0/big", "U8", (5 << 20,), 0, big))
    file, entries = write_rank_file(tmp_path, 0, 1, pieces, {})
    raw = (tmp_path / file.name).read_bytes()
    assert {e.name: raw[e.offset : e.offset + e.nbytes] for e in entries} == {p.name: bytes(p.data) for p in pieces}
    assert entries[0].name == "rank/0/big"  # of a round size: what lies behind it lies on a round place, too
    assert (file.block_size, file.blocks) == (CHUNK, blocks_of(raw, CHUNK)) and len(file.blocks) == 6


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a": {1: 2}}, "/a"), ({"a": [0, (1, 2)]}, "/a/1"), ({"a": math.nan}, "/a"), ({"a": {"b": -math.inf}}, "/a/b"),
        ({"a": b"x"}, "/a"), ({"lr": np.float64(0.1)}, "/lr"), ({"x": torch.zeros(1)}, "/x"),
    ],
)  # fmt: skip
def test_state_not_representable_in_json_is_refused_with_key(state: Any, key: str) -> None:
    with pytest.raises(StateError, match=f"at {key} "):
        encode_state(state)


def test_recursive_state_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(StateError, match="nested deeper"):
        encode_state(state)


@pytest.mark.parametrize(
    "pieces",
    [
        [Given("w", "F32", (2,), 0, b"12345")],
        [Given("w", "F32", (2,), 1, b"12345678")],
        [Given("w", "F32", (2,), 0, b"")],
        [Given("w", "C128", (1,), 0, bytes(16))],
        [Given("w", "F32", (-1,), 0, b"")],
        [Given("", "F32", (1,), 0, bytes(4))],
        [Given("w\ud800", "F32", (1,), 0, bytes(4))],
        [Given("w", "F32", (1,), 0, bytes(4)), Given("w", "F32", (1,), 0, bytes(4))],
        [Given("w#0", "F32", (1,), 0, bytes(4)), Given("w", "F32", (2,), 0, bytes(4))],
        [Given("__metadata__", "F32", (1,), 0, bytes(4))],
    ],
)
def test_tensor_not_matching_description_is_refused(tmp_path: Path, pieces: list[Given]) -> None:
    with pytest.raises(StateError, match="tensor"):
        write_rank_file(tmp_path / "step", 0, 1, pieces, {})
    assert not (tmp_path / "step").exists()


def test_a_committed_checkpoint_is_never_written_to(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, 1, world_size=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / manifest.id).iterdir()}
    with pytest.raises(CheckpointError) as caught:
        write_rank_file(tmp_path / manifest.id, 0, 1, [], {})
    assert caught.value.code == EXISTS
    assert {path.name: path.read_bytes() for path in (tmp_path / manifest.id).iterdir()} == before


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_rank_file_disk_error_has_path_and_advice_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00001\.safetensors was not written: ") as caught:
        write_rank_file(tmp_path, 0, 1, [Given("rank/0/w", "F32", (1,), 0, bytes(4))], {})
    monkeypatch.undo()
    assert caught.value.code == NOT_WRITTEN
    assert ("free space" if number == errno.ENOSPC else "kernel log") in caught.value.detail
    assert list(tmp_path.iterdir()) == []


def test_rank_file_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))
    pieces = [Given("rank/0/a", "U8", (50,), 0, bytes(range(50))), Given("rank/0/b", "U8", (3,), 0, b"xyz")]
    file, _ = write_rank_file(tmp_path, 0, 1, pieces, {})
    raw = (tmp_path / file.name).read_bytes()
    assert raw.endswith(bytes(range(50)) + b"xyz") and file.blocks == blocks_of(raw, BLOCK)
