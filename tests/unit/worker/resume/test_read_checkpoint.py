"""A rank reads what it starts from with the cores it has to itself, and keeps it once."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.parse import parse_spec
from ratchet_store.write import rank_file
from ratchet_worker.host.cpu import rank_cores
from ratchet_worker.resume.read_checkpoint import Chosen, differences, read
from ratchet_worker.state import optimizer as optimizer_state
from ratchet_worker.state.environment import PACKAGES
from ratchet_worker.state.snapshot import byte_view, empty
from tests.support.checkpoints import make_checkpoint, shared_bytes
from tests.support.kube_jobs import launch_of

BLOCK = 4096


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, "1", 2), (2, "2", 1), (1, "1", 1), (1, "4", 1), (64, "8", 4), (64, None, 1)]
)
def test_own_cores_is_rank_share_of_available_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str | None, threads: int
) -> None:
    """Who is no rank, as an export beside others' jobs, takes one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert rank_cores() == threads


def test_a_rank_alone_on_two_cores_reads_two_blocks_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "BLOCK", BLOCK)
    manifest = make_checkpoint(tmp_path, 7, seed=3, scale=24)
    chosen = Chosen(manifest=manifest, directory=tmp_path / manifest.id)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    real, both = os.preadv, threading.Barrier(2)

    def at_once(fd: int, buffers: Any, offset: int) -> int:
        if offset < 2 * BLOCK:
            both.wait(20.0)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", at_once)
    snapshot = read(chosen, [1], verified_ranks=[0, 1])[1]
    assert {f"shared/{n}": bytes(byte_view(t)) for n, t in snapshot.shared.items()} == shared_bytes(3, 24)
    (tmp_path / manifest.id / manifest.files[1].name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-00001.*truncated or replaced"):
        read(chosen, [1])


def test_tensor_to_read_into_is_not_filled_under_deterministic_algorithms() -> None:
    """Memory of this size is new, or has what earlier tests left: it is not all NaN until something fills it."""
    torch.use_deterministic_algorithms(True)
    try:
        made, control = empty("F32", (1 << 12, 1 << 12)), torch.empty(1 << 12, 1 << 12)
    finally:
        torch.use_deterministic_algorithms(False)
    assert made.shape == control.shape and made.stride() == control.stride()
    assert not made.isnan().all() and control.isnan().all()
    assert empty("BF16", ()).shape == () and empty("I64", (0, 7)).shape == (0, 7)


def test_optimizer_restore_reuses_read_memory_when_layout_matches() -> None:
    """No second copy of the larger part of a state, but where it lay in another order."""
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    names = {id(p): n for n, p in model.named_parameters()}
    shared, rest = optimizer_state.capture(optimizer, "optimizer", names, list(names.values()))
    stored = {n: t.clone(memory_format=torch.contiguous_format) for n, t in shared.items()}
    optimizer_state.restore(optimizer, "optimizer", names, stored, rest)
    for parameter, name in ((model.weight, "weight"), (model.bias, "bias")):
        now, read_ = optimizer.state[parameter]["momentum_buffer"], stored[f"optimizer/{name}/momentum_buffer"]
        assert torch.equal(now, read_) and now.stride() == parameter.stride()
        assert (now.data_ptr() == read_.data_ptr()) == (name == "bias")


def test_spec_differences_name_fields_or_digests_without_launch_file(
    tmp_path: Path,
) -> None:
    """``ttl`` changes no bit. A value of ``env`` may be a secret."""
    given = {"name": "a", "script": ["train.py"], "code": {"path": "."}, "env": {"KEY": "hidden-1"}}
    then = launch_of(parse_spec(given))
    now = launch_of(
        parse_spec({**given, "script": ["train.py", "--lr", "0.01"], "ttl": 60, "env": {"KEY": "hidden-2"}})
    )
    paths = JobPaths(tmp_path)
    manifest = make_checkpoint(paths.checkpoints, 7).model_copy(
        update={"spec_digest": then.spec.digest(), "world_size": 1}
    )

    def found(launch: LaunchFile) -> dict[str, tuple[object, object]]:
        told = differences(manifest, paths.checkpoints / manifest.id, {PACKAGES: "none"}, [], launch, None)
        return {one.key: (one.recorded, one.current) for one in told if one.key.startswith("spec")}

    digests = {"spec_digest": (then.spec.digest(), now.spec.digest())}
    assert found(then) == {} and found(now) == digests
    file = paths.attempt(manifest.attempt).launch_file
    file.parent.mkdir(parents=True)
    file.write_text(then.model_dump_json())
    assert found(now) == {
        "spec:env.KEY": ("a value", "another"),
        "spec:script": ('["train.py"]', '["train.py", "--lr", "0.01"]'),
    }
    file.write_text(now.model_dump_json())  # not the attempt that saved it
    assert found(now) == digests


@pytest.mark.parametrize(
    ("then", "now", "key"),
    [
        (1, 1.0, "spec:task.args.x"),
        (0.0, -0.0, "spec:task.args.x"),
        (True, 1, "spec:task.args.x"),
        ({}, None, "spec:task.args.x"),
        ({"y": None}, {"z": None}, "spec_digest"),
    ],
)
def test_spec_difference_detects_int_float_and_signed_zero_change(
    tmp_path: Path, then: object, now: object, key: str
) -> None:
    """Python calls them equal; a task may compute other bits with them."""
    specs = [
        parse_spec({"name": "a", "task": {"entrypoint": "m:T", "args": {"x": x}}, "code": {"path": "."}})
        for x in (then, now)
    ]
    paths, launches = JobPaths(tmp_path), [launch_of(spec) for spec in specs]
    manifest = make_checkpoint(paths.checkpoints, 7).model_copy(
        update={"spec_digest": specs[0].digest(), "world_size": 1}
    )
    file = paths.attempt(manifest.attempt).launch_file
    file.parent.mkdir(parents=True)
    file.write_text(launches[0].model_dump_json())
    told = differences(manifest, paths.checkpoints / manifest.id, {PACKAGES: "none"}, [], launches[1], None)
    assert [one.key for one in told if one.key.startswith("spec")] == [key]
