# ruff: noqa: F811  (fixtures)
"""The save before the first scheduled one, by real ranks: who is killed in the first interval goes on from it, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.paths import MANIFEST_NAME
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import ForkSource
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.object_store.remote_checkpoints import open_job_checkpoints
from ratchet_store.read.compare import compare, render
from tests.support.full_matrix import full
from tests.support.launch import Attempt, Job
from tests.support.object_stores import BUCKET, PATIENT, S3Server, s3, s3_server  # noqa: F401
from tests.support.server import wait_for

STEPS = 40
URI = f"s3://{BUCKET}/team"
TASK = '''
import time
from pathlib import Path
import torch
from torch import nn
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randn(16, generator=torch.Generator().manual_seed(i))


class Held:
    """Dropout draws, buffers move, the rate warms up. Waits in step ``hold`` until the file ``gate`` is there."""

    def __init__(self, steps, hold, gate):
        self.steps, self.hold, self.gate = steps, hold, Path(gate)

    def build(self, context):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 16))
        data = TrainLoader(Data(), batch_size=8, seed=3, rank=context.rank, world_size=context.world_size)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return Parts(model=net, optimizer=optimizer, scheduler=self.scheduler, train=data, total_steps=self.steps)

    def loss(self, model, batch):
        while self.scheduler.last_epoch + 1 == self.hold and not self.gate.exists():
            time.sleep(0.01)
        return (model(batch) - batch).square().mean()
'''


@pytest.fixture
def home(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    code.mkdir()
    (code / "held.py").write_text(TASK)
    return tmp_path


def job(
    home: Path,
    name: str,
    hook: dict[str, Any],
    hold: int = 0,
    *,
    job_id: str = "job",
    afresh: bool = False,
    **checkpoint: Any,
) -> Job:
    spec = {
        "task": {"entrypoint": "held:Held", "args": {"steps": STEPS, "hold": hold, "gate": str(home / f"{name}.gate")}},
        "hook": hook,
        "checkpoint": {"every_steps": 30, **checkpoint},
    }
    return Job(home / name, spec, home / "code", job_id=job_id, afresh=afresh)


def saves(attempt: Attempt) -> list[tuple[int, str]]:
    return [(m.step, m.reason) for m in attempt.messages(kind="checkpoint")]


POWER = {"name": "powerSGD", "start_powerSGD_iter": 3, "min_compression_rate": 1}


@pytest.mark.parametrize(
    ("hook", "checkpoint"),
    [
        (POWER, {}),
        ({"name": "allreduce"}, {"first": 4, "staging": "blocking"}),
        ({"name": "post_localSGD", "start_localSGD_iter": 2, "model_averaging_period": 3}, {}),
    ],
    ids=["powerSGD", "at a step", "post_localSGD"],
)
def test_rank_killed_in_first_interval_resumes_from_first_save(
    home: Path, jobs: list[Job], hook: dict[str, Any], checkpoint: dict[str, Any]
) -> None:
    whole, cut = job(home, "whole", hook, first="off"), job(home, "cut", hook, 6, **checkpoint)
    jobs += [whole, cut]
    undisturbed, killed = whole.launch(), cut.launch()
    first = checkpoint.get("first", 1)
    killed.wait_step(5)
    wait_for(lambda: cut.checkpoints() == [f"step-{first:012d}.a0001"], f"the first save\n{killed.logs()}", 30)
    killed.kill(1)
    assert killed.wait().cause is Cause.RANK_KILLED
    (home / "cut.gate").touch()
    resumed = cut.launch()
    assert resumed.wait().cause is Cause.COMPLETED, resumed.logs()
    assert undisturbed.wait().cause is Cause.COMPLETED, undisturbed.logs()
    assert (resumed.report().verdict, resumed.report().base.step) == ("exact", first)
    assert saves(killed) == [(first, "first")]
    assert saves(resumed) == saves(undisturbed) == [(30, "schedule"), (STEPS, "end")]
    comparison = compare(whole.newest(), cut.newest())
    assert comparison.identical, render(comparison)


def test_first_save_is_deleted_after_two_others_and_moves_no_schedule(home: Path, jobs: list[Job]) -> None:
    best = {"metric": "loss", "mode": "max", "count": 1}
    one = job(home, "one", {"name": "allreduce"}, every_steps=7, keep_last=3, keep_best=best, when_busy="skip")
    jobs.append(one)
    attempt = one.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    found = saves(attempt)
    assert found[0] == (1, "first") and {step for step, _ in found[1:]} <= {7, 14, 21, 28, 35, STEPS}
    assert found[1] == (7, "schedule")  # not left out, whether or not the one before was still being written
    assert 1 in {m.step for m in attempt.messages(kind="checkpoint_deleted")}
    assert not any(name.startswith("step-000000000001.") for name in one.checkpoints())


@full
def test_fork_and_lost_disk_resume_from_first_save(home: Path, jobs: list[Job], s3: S3Server) -> None:
    hook = {"name": "allreduce"}
    whole = job(home, "whole", hook, first="off", every_steps=12)
    cut = job(home, "cut", hook, 6, uri=URI, afresh=True)
    jobs += [whole, cut]
    undisturbed, killed = whole.launch(), cut.launch()
    there = open_job_checkpoints(URI, "job", PATIENT)
    wait_for(
        lambda: MANIFEST_NAME in there.list_checkpoints().get((1, 1), ()),
        f"the copy of the first save\n{killed.logs()}",
        30,
    )
    killed.kill(0)
    assert killed.wait().cause is Cause.RANK_KILLED
    assert undisturbed.wait().cause is Cause.COMPLETED, undisturbed.logs()
    shutil.rmtree(cut.paths.checkpoints)
    (home / "cut.gate").touch()

    middle = read_manifest(whole.paths.checkpoints / "step-000000000024.a0001")
    source = ForkSource(job_root=str(whole.paths.root), step=middle.step, attempt=middle.attempt, digest=middle.digest)
    fork = job(home, "fork", hook, 29, job_id="fork")
    jobs.append(fork)
    resumed, forked = cut.launch(), fork.launch(fork=source)
    wait_for(lambda: fork.checkpoints() == ["step-000000000025.a0001"], f"the fork's first save\n{forked.logs()}", 30)
    forked.kill(1)
    assert forked.wait().cause is Cause.RANK_KILLED
    (home / "fork.gate").touch()
    again = fork.launch()  # as the service does once a checkpoint of the fork's own is there
    older = whole.launch(lineage=[Segment(attempt=1, after_step=0, until_step=24)])
    for attempt, base in ((resumed, 1), (again, 25), (older, 24)):
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        assert (attempt.report().verdict, attempt.report().base.step) == ("exact", base), attempt.report()
    assert saves(older) == [(36, "schedule"), (STEPS, "end")]
    for one in (cut, fork):
        assert saves(one.attempts[1]) == [(30, "schedule"), (STEPS, "end")]
        comparison = compare(whole.newest(), one.newest())
        assert comparison.identical, render(comparison)
