"""A state in one file: every bit comes back, a killed or failed save leaves the file of before, other files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ratchet_hooks import files
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.files import load_state, save_state


def test_what_a_script_saves_comes_back_bit_for_bit(tmp_path: Path) -> None:
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


def test_a_save_that_does_not_end_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="rank-0"):
        load_state(tmp_path / "rank-0.safetensors")
    whole = tmp_path / "state.safetensors"
    save_state(whole, {"w": torch.zeros(100)})
    os.truncate(whole, whole.stat().st_size - 50)
    with pytest.raises(HookStateError, match="not a whole safetensors file"):
        load_state(whole)
    save_file({"w": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(HookStateError, match="not one that save_state wrote"):
        load_state(tmp_path / "other.safetensors")
    for damaged in ("{", "[" * 100_000, '{"foo": 1}'):
        save_file({}, tmp_path / "damaged.safetensors", metadata={"ratchet_state": damaged})
        with pytest.raises(HookStateError):
            load_state(tmp_path / "damaged.safetensors")
