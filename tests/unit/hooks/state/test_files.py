"""A state in one file: every bit comes back, a killed or failed save leaves the file of before, other files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save_file

from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state import files
from ratchet_hooks.state.files import DTYPES, load_state, pack_state, save_state, unpack_state


def test_saved_state_loads_bit_for_bit(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(2, 1, 4, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "epoch": 3,
        "numpy": np.random.RandomState(5), "loss": 0.1, "hook": ({"q": torch.randn(3, 2)}, {"version": 1}),
    }  # fmt: skip
    save_state(tmp_path / "new" / "rank-0.safetensors", state)
    found = load_state(tmp_path / "new" / "rank-0.safetensors")
    assert list(found) == list(state) and found["epoch"] == 3 and found["loss"] == 0.1
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in net.state_dict().items())
    moment = found["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(moment, optimizer.state_dict()["state"][0]["exp_avg"])
    assert torch.equal(found["rng"], state["rng"]) and found["hook"][1] == {"version": 1}
    assert found["numpy"].rand() == np.random.RandomState(5).rand()


def test_state_file_is_compatible_with_safetensors_library(tmp_path: Path) -> None:
    """And a file that the library wrote, which may order its tensors otherwise, is read."""
    shapes = [(), (0,), (3,), (2, 0, 3), (2, 3, 5)]
    plain = [dtype for dtype in DTYPES.values() if not dtype.is_complex]
    state = {f"{d}{s}": torch.randint(0, 2, s).to(d) for d in plain for s in shapes}
    state["alone"] = torch.randn(7, dtype=torch.complex64)
    file = tmp_path / "state.safetensors"
    save_state(file, state)
    with safe_open(file, framework="pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    save_file(tensors, tmp_path / "theirs.safetensors", metadata=metadata)
    packed = pack_state(state)
    assert packed.numpy().tobytes() == file.read_bytes() and load(file.read_bytes()).keys() == tensors.keys()
    for found in (load_state(file), load_state(tmp_path / "theirs.safetensors"), unpack_state(packed)):
        assert list(found) == list(state)
        for name, tensor in state.items():
            assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
            bits, others = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
            assert torch.equal(bits, others)


def test_state_too_large_to_read_back_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    for much in ([0] * 4_000_001, ["x" * 1000] * 70_000):
        with pytest.raises(HookStateError, match=r"state: too much of it is not in tensors: it (has|needs)"):
            save_state(file, much)
    assert [*tmp_path.iterdir()] == []


def test_failed_save_keeps_previous_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.safetensors"
    save_state(file, {"epoch": 1})
    with pytest.raises(HookStateError, match=r"state\.model: a .*Linear cannot be stored"):
        save_state(file, {"model": torch.nn.Linear(2, 2)})

    def torn(fd: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files.os, "fsync", torn)
    with pytest.raises(OSError, match="No space"):
        save_state(file, {"epoch": 2})
    assert load_state(file) == {"epoch": 1}


def test_load_of_missing_or_damaged_state_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="rank-0"):
        load_state(tmp_path / "rank-0.safetensors")
    whole = tmp_path / "state.safetensors"
    save_state(whole, {"w": torch.zeros(100)})
    os.truncate(whole, whole.stat().st_size - 50)
    with pytest.raises(HookStateError, match="not a complete safetensors file"):
        load_state(whole)
    save_file({"w": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(HookStateError, match="not one that save_state wrote"):
        load_state(tmp_path / "other.safetensors")
    for damaged in ("{", "[" * 100_000, '{"foo": 1}'):
        save_file({}, tmp_path / "damaged.safetensors", metadata={"ratchet_state": damaged})
        with pytest.raises(HookStateError, match=r"damaged\.safetensors: "):
            load_state(tmp_path / "damaged.safetensors")


def test_tensor_of_a_type_without_a_name_in_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(HookStateError, match=r"torch.float8_e8m0fnu cannot be stored") as caught:
        save_state(tmp_path / "state", {"residual": torch.zeros(2).to(torch.float8_e8m0fnu)})
    assert "residual" in caught.value.key and not (tmp_path / "state").exists()
