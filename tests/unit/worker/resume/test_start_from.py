"""Files of other programs as a job's beginning: what fits is taken bit for bit, what does not is refused and runs nothing."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ratchet_contract.errors import SpecError, UserError
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.preflight import start_from
from ratchet_service.preflight.report import Report
from ratchet_service.user_code import snapshot
from ratchet_worker.resume.start_from import Imported, find_state_dict, load_into, read, report


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Calls:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def _net(seed: int) -> Tied:
    torch.manual_seed(seed)
    net = Tied()
    net.norm.running_mean.normal_()  # type: ignore[union-attr]
    return net


def _equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(k == j and torch.equal(v, w) for (k, v), (j, w) in pairs)


def _refusal(data: Any, name: str = "m.pt") -> str:
    with pytest.raises(UserError) as caught:
        load_into(_net(0), find_state_dict(data, name), name)
    assert caught.value.code == "import-mismatch"
    return caught.value.detail


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3, "best": np.float64(0.5), "args": argparse.Namespace(lr=0.1)},
        lambda s: {"model_state_dict": {f"module.{k}": v for k, v in s.items()}, "optimizer": {}},
        lambda s: {"model": {f"module._orig_mod.{k}": v for k, v in s.items()}},
        lambda s: {k: v for k, v in s.items() if k != "b.weight"},  # as safetensors has tied ones
    ],
)
def test_start_from_common_checkpoint_forms_is_bit_exact(tmp_path: Path, wrap: Any) -> None:
    source, target = _net(1), _net(2)
    assert not _equal(source, target)
    torch.save(wrap(source.state_dict()), tmp_path / "m.pt")
    assert load_into(target, find_state_dict(read(tmp_path / "m.pt", "m.pt"), "m.pt"), "m.pt") == []
    assert _equal(source, target) and target.a.weight is target.b.weight


def test_start_from_safetensors_notes_dtype_cast(tmp_path: Path) -> None:
    source, target = _net(1), _net(2)
    state = {k: v.clone() for k, v in source.state_dict().items() if k != "b.weight"}
    state["a.weight"] = state["a.weight"].half()
    save_file(state, tmp_path / "m.safetensors")
    notes = load_into(target, find_state_dict(read(tmp_path / "m.safetensors", "m.safetensors"), "m"), "m")
    assert notes == ["1 tensor cast, like a.weight: torch.float16 to torch.float32"]
    assert torch.equal(target.b.weight, state["a.weight"].float())


def test_start_from_unsafe_pickle_is_refused_without_executing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    bad = {"state_dict": _net(1).state_dict(), "x": Calls(mark)}
    torch.save(bad, tmp_path / "zip.pt")
    torch.save(bad, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(bad["x"], protocol=2))
    torch.save(_net(1), tmp_path / "module.pt")  # a whole module, as many tutorials save it
    for name, word in (("zip.pt", "posix.system"), ("old.pt", "system"), ("raw.pt", "system"), ("module.pt", "Tied")):
        with pytest.raises(UserError, match=word) as caught:
            read(tmp_path / name, name)
        assert caught.value.code in ("import-refused", "import-unreadable"), name
    assert not mark.exists()
    pickle.loads((tmp_path / "raw.pt").read_bytes())  # noqa: S301  (the control: it would have)
    assert mark.exists()


def test_start_from_refusal_names_no_class_that_is_read_without_it(tmp_path: Path) -> None:
    dtypes = [np.ones(1, kind) for kind in ("i4", "i8", "f4", "f8", "u1")]
    torch.save({"args": argparse.Namespace(a=1), "arrays": dtypes, "x": Tied()}, tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"m\.pt needs [^ ]*\.Tied, ") as caught:
        read(tmp_path / "m.pt", "m.pt")
    assert "argparse" not in caught.value.detail and "numpy" not in caught.value.detail


def test_start_from_truncated_file_is_refused(tmp_path: Path) -> None:
    torch.save(_net(1).state_dict(), tmp_path / "m.pt")
    save_file({"w": torch.ones(100)}, tmp_path / "m.safetensors")
    for name in ("m.pt", "m.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for data in (whole[: len(whole) // 2], whole[:7], b"", b"\xff" * 64):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(UserError) as caught:
                read(tmp_path / name, name)
            assert caught.value.code in ("import-unreadable", "import-refused")


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_start_from_file_that_the_disk_does_not_deliver_is_no_users_error(name: str) -> None:
    """Linux refuses to deliver the first bytes of this file (EIO), or to map it; a missing one is the user's error."""
    with pytest.raises(OSError, match=r"Input/output error|\(os error"):
        read(Path("/proc/self/mem"), name)
    with pytest.raises(UserError) as caught:
        read(Path("/proc/self/missing"), name)
    assert caught.value.code == "import-unreadable"


def test_start_from_mismatched_model_is_refused_by_key() -> None:
    state = dict(_net(1).state_dict())
    assert "lacks 'norm.weight'" in _refusal({k: v for k, v in state.items() if k != "norm.weight"})
    assert "no 'head.bias'" in _refusal(state | {"head.bias": torch.ones(3)})
    assert "norm.bias is torch.float32 [4] in m.pt" in _refusal(state | {"norm.bias": torch.ones(4)})
    assert "a.weight is torch.complex64" in _refusal(state | {"a.weight": torch.ones(3, 3, dtype=torch.complex64)})
    assert "one tensor in the model" in _refusal(state | {"b.weight": torch.ones(3, 3)})
    assert "its keys are 'epoch'" in _refusal({"epoch": 3})
    assert "a str" in _refusal(state | {"norm.bias": "text"})


def test_start_from_loads_matching_optimizer_and_reports_the_rest() -> None:
    source, net = _net(1), _net(1)
    first, second = (torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (source, net))
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    found = Imported("m.pt", "from m.pt", first.state_dict(), has_hook=True)
    told = report(found, 0, {"optimizer": second}, ["scheduler"], stateful_hook=True)
    assert [(r.component, r.status) for r in told] == [
        ("model", "imported"), ("optimizer", "imported"), ("scheduler", "absent"), ("hook", "absent"),
    ]  # fmt: skip
    assert all(r.reason for r in told) and "comm_hook_state" in (told[-1].reason or "")
    assert torch.equal(second.state[net.a.weight]["momentum_buffer"], torch.ones(3, 3))
    other = torch.optim.SGD([nn.Parameter(torch.ones(2)), *net.norm.parameters()], momentum=0.9)
    with pytest.raises(UserError, match="momentum_buffer"):
        report(found, 0, {"optimizer": other}, [], stateful_hook=False)
    with pytest.raises(UserError, match="no optimizer is registered"):
        report(found, 0, {}, [], stateful_hook=False)


def _problems(path: Path | str, **start: Any) -> list[tuple[str, str]]:
    spec = parse_spec({"name": "x", "task": {"entrypoint": "a:B"}, "start_from": {"path": str(path), **start}})
    found = Report()
    start_from.check(spec, found)
    return [(p.pointer, p.code) for p in found.problems]


def test_preflight_refuses_unusable_start_from_file(tmp_path: Path) -> None:
    good = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(5), "none": torch.ones(0)}, good)
    torch.save({}, tmp_path / "m.pt")
    assert _problems(good) == _problems(tmp_path / "m.pt") == []
    (tmp_path / "link.safetensors").symlink_to(good)
    assert _problems(tmp_path / "link.safetensors") == []
    assert _problems(good, optimizer=True) == [("/start_from/optimizer", "import-no-optimizer")]
    assert _problems("m.pt") == [("/start_from/path", "relative-path")]
    assert _problems(tmp_path / "none.pt") == _problems(tmp_path) == [("/start_from/path", "import-not-found")]
    whole = good.read_bytes()
    huge = (1 << 62).to_bytes(8, "little") + whole[8:]
    bomb = (70_000).to_bytes(8, "little") + (b'{"w":' + b"[" * 69_995)
    for data in (whole[:-1], whole + b"x", huge, bomb, b"", b"{}", whole.replace(b"F32", b"F99")):
        good.write_bytes(data)
        assert _problems(good) == [("/start_from/path", "import-unreadable")], data[:40]
    (tmp_path / "m.pt").write_bytes(b"hello, world")
    assert _problems(tmp_path / "m.pt") == [("/start_from/path", "import-unreadable")]


def test_start_from_file_snapshot_is_addressed_by_content(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"PK\x03\x04 one")
    digest = snapshot.snapshot_file(tmp_path / "m.pt", tmp_path / "code")
    assert digest == snapshot.snapshot_file(tmp_path / "m.pt", tmp_path / "code")
    (tmp_path / "m.pt").write_bytes(b"PK\x03\x04 two")
    assert (tmp_path / "code" / digest / "m.pt").read_bytes() == b"PK\x03\x04 one"
    assert digest != snapshot.snapshot_file(tmp_path / "m.pt", tmp_path / "code")
    assert snapshot.remove_unreferenced(tmp_path / "code", lambda: {digest}, grace=-1.0) != []
    assert [p.name for p in (tmp_path / "code").iterdir() if p.is_dir()] == [digest]
    (tmp_path / "m.pt").unlink()
    with pytest.raises((SpecError, FileNotFoundError)):
        snapshot.snapshot_file(tmp_path / "m.pt", tmp_path / "code")


def test_spec_digest_without_start_from_is_unchanged() -> None:
    data = {"name": "x", "task": {"entrypoint": "a:B"}}
    plain, begun = parse_spec(data), parse_spec({**data, "start_from": {"path": "/m.pt"}})
    assert plain.digest() != begun.digest()
    assert plain.digest() == "aed81da03811f0801ce45bf15858e2ba2dd457cdc416be47e84e17a018b2d496"
