"""Real ranks that save beside their training: what is in every checkpoint is what it is when everything waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.launch import Attempt, Job

STEPS = 7
TASK = '''
import torch
from torch import nn
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randn(48, generator=torch.Generator().manual_seed(i))


class Beside:
    """Buffers move in the forward pass, residuals in the backward pass. ``clip``: parameters too, behind torch's back, at the
    begin of a step; ``touch``: so that torch notices, in that step."""

    def __init__(self, clip=False, touch=0):
        self.clip, self.touch, self.calls = clip, touch, 0

    def build(self, context):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(48, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 48))
        data = TrainLoader(Data(), batch_size=8, seed=3, rank=context.rank, world_size=context.world_size)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        return Parts(model=net, optimizer=optimizer, train=data, total_steps=%d)

    def loss(self, model, batch):
        self.calls += 1
        if self.clip:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)
        if self.calls == self.touch:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        return (model(batch) - batch).square().mean()
'''


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    code = tmp_path / "code"
    code.mkdir()
    (code / "beside.py").write_text(TASK % STEPS)
    yield tmp_path


def start(home: Path, name: str, ranks: int, staging: str, **args: object) -> Attempt:
    spec = {
        "task": {"entrypoint": "beside:Beside", "args": args},
        "world": {"ranks_per_node": ranks, "device": "cpu"},
        "hook": {"name": "powerSGD", "start_powerSGD_iter": 3, "min_compression_rate": 1},
        "checkpoint": {"every_steps": 1, "keep_every": 1, "staging": staging},
    }
    return Job(home / name, spec, home / "code", job_id="job").launch()


def same_at_every_step(a: Attempt, b: Attempt) -> None:
    ids = [f"step-{step:012d}.a0001" for step in range(1, STEPS + 1)]
    assert a.job.checkpoints() == b.job.checkpoints() == ids
    for name in ids:
        comparison = compare(a.job.paths.checkpoints / name, b.job.paths.checkpoints / name)
        assert comparison.identical, f"{name}\n{render(comparison)}"


def test_overlapped_save_has_the_same_bits_as_blocking_save(home: Path) -> None:
    runs = [start(home, staging, 2, staging) for staging in ("overlapped", "blocking")]
    try:
        for run in runs:
            assert run.wait().cause is Cause.COMPLETED, run.logs()
        assert all(m.stall is not None for m in runs[0].messages(kind="checkpoint"))
        assert not [m for m in runs[0].messages(kind="note") if m.type == "staging-blocking"]
        same_at_every_step(*runs)
    finally:
        for run in runs:
            run.close()


def test_untracked_parameter_change_switches_to_blocking_staging(home: Path) -> None:
    runs = [start(home, staging, 1, staging, clip=True) for staging in ("auto", "blocking")]
    touched = start(home, "touched", 1, "auto", touch=5)
    try:
        for run in (*runs, touched):
            assert run.wait().cause is Cause.COMPLETED, run.logs()
        (note,) = [m for m in runs[0].messages(kind="note") if m.type == "staging-blocking"]
        assert "shared/model/" in note.message and "checkpoint.staging" in note.message
        same_at_every_step(*runs)
        # Now and then only: torch counts it, and the checkpoint that would have been of two steps is none.
        failed = touched.messages(kind="checkpoint_failed")
        assert [m.step for m in failed] in ([4], [])
        assert all("shared/model/" in m.error and "was changed before it was copied" in m.error for m in failed)
        kept = {int(name[5:17]) for name in touched.job.checkpoints()}
        assert kept == set(range(1, STEPS + 1)) - {m.step for m in failed}
    finally:
        for run in (*runs, touched):
            run.close()
