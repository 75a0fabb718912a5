"""Scripts whose state lies where torch's own examples have it, killed and resumed: the same bits, or the report says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.messages import ForkSource
from ratchet_store.format.manifest_file import read_changed_marker, read_manifest
from ratchet_store.read.compare import compare, render
from tests.support.launch import Attempt, Job
from tests.support.server import wait_for

COMMON = '''
import copy, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session import Session

FLAG = Path(sys.argv[1])
STEPS = 12


def until(holds, what, seconds=30):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def killed():
    """Once in a job's life, when something is saved."""
    if FLAG.exists():
        return
    until(lambda: list(FLAG.parent.glob("job/jobs/*/checkpoints/*/MANIFEST.json")), "nothing was saved")
    FLAG.touch()
    os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)), nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) / 4)
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("mask", torch.ones(2100, 2100))  # of more bytes than are compared by value

    def forward(self, x):
        y = torch.fft.irfft(torch.fft.rfft(self.body(x)) @ self.weight, n=6) - self.center
        if self.training:
            self.center.lerp_(y.detach().mean(0), 0.3)
        return self.head(y)


with Session() as s:
    torch.manual_seed(1)
    net = Net()
    data = TrainLoader(torch.randn(64, 6), batch_size=4, seed=3, rank=s.rank, world_size=s.world_size)
    model = s.wrap(net)
'''
COPIES = (
    COMMON
    + """    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(list(set(net.body.parameters()) | {net.weight}), lr=0.01)
    if s.step >= 5:
        optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.1})
    s.register(optimizer=optimizer, data=data, average=average, teacher=teacher)
    batches = s.batches()
    for step in s.steps(STEPS):
        if step == 4 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.1})
        if step == 8:
            killed()
        x = next(batches)
        with torch.no_grad():
            wanted = teacher(x) + average(x)
        (model(x) - wanted + x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            for p, q in zip(teacher.module.parameters(), net.parameters()):
                p.lerp_(q, 0.2)
        if step == 5:  # the next forward pass does not begin with rank 0's buffers, since this one has no gradients
            with torch.no_grad():
                model(x)
"""
)
SCHEDULED = (
    COMMON
    + """    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    s.register(optimizer=optimizer, data=data, scheduler=scheduler)
    batches = s.batches()
"""
)
LATE = (
    SCHEDULED
    + """    late = sys.argv[2] == "late"
    for step in s.steps(STEPS):
        if step == 8:
            killed()
        x = next(batches)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not late:
            scheduler.step()
        if step == 6:
            assert s.checkpoint()
            with s.evaluation() as ev:
                if sys.argv[2] == "changing":
                    nn.init.constant_(net.head.weight, 0.1)
                found = ev.averages({"loss": (float((net(x) - x).square().mean()), 1)})
            s.log(found)
        if late:
            scheduler.step()
"""
)
BEHIND = (
    SCHEDULED
    + """    for step in s.steps(STEPS):
        x = next(batches)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step != 6:
            continue
        assert s.checkpoint()
        if sys.argv[2] == "held":
            FLAG.with_name(f"held.{s.rank}").touch()
            until(FLAG.with_name("go").exists, "nobody let it go on", 60)
        with s.evaluation() as ev:
            if sys.argv[2] == "killed":
                killed()
            found = ev.averages({"loss": (float((net(x) - x).square().mean()), 1)})
        s.log(found)
        if sys.argv[3] == "late":
            scheduler.step()
"""
)


MIDDLE = (
    SCHEDULED
    + """    for step in s.steps(STEPS):
        if step == 8:
            killed()
        if sys.argv[2] == "number drawn":
            torch.rand(1)
        if sys.argv[2] == "scheduler stepped":
            scheduler.step()
        if step == 7 and sys.argv[2] != "batch taken":
            assert s.checkpoint()
        x = next(batches)
        if step == 7 and sys.argv[2] == "batch taken":
            assert s.checkpoint()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    jobs: list[Job] = []

    def job(name: str, script: str, *arguments: str, killed: bool = True, strict: bool = True, **spec: Any) -> Job:
        code = tmp_path / name / "code"
        code.mkdir(parents=True)
        (code / "train.py").write_text(script)
        flag = tmp_path / name / "flag"
        if not killed:
            flag.touch()
        whole = {
            "script": ["train.py", str(flag), *arguments],
            "code": {"path": str(code)},
            "checkpoint": {"every_steps": 6, "first": "off"},
            "determinism": "strict" if strict else "warn",
            **spec,
        }
        jobs.append(Job(tmp_path / name / "job", whole, code))
        return jobs[-1]

    yield job
    for one in jobs:
        one.close()


def resumed(job: Job) -> Attempt:
    assert job.launch().wait().cause is Cause.RANK_KILLED, job.attempts[0].logs()
    return job.launch()


def test_model_copies_and_added_parameter_group_resume_exactly(make: Any) -> None:
    whole, cut = make("whole", COPIES, killed=False), make("cut", COPIES)
    undisturbed, attempt = whole.launch(), resumed(cut)
    assert undisturbed.wait().cause is attempt.wait().cause is Cause.COMPLETED, attempt.logs() + undisturbed.logs()
    assert (attempt.report().verdict, attempt.report().base.step) == ("exact", 6)
    found = compare(whole.newest(), cut.newest())
    assert found.identical, render(found)


def test_state_changed_after_checkpoint_call_makes_resume_not_exact(make: Any) -> None:
    """Named at the resume, refused under strict, and known to a fork."""
    warned, strict, clean = (
        make("warn", LATE, "late", strict=False),
        make("strict", LATE, "late"),
        make("clean", LATE, "no"),
    )
    killed = warned.launch()
    attempts = resumed(strict), resumed(clean)
    result = attempts[0].wait()
    assert result.cause is Cause.USER_ERROR and "call checkpoint() last" in str(result.message), attempts[0].logs()
    assert "not everything is restored exactly: checkpoint of rank" in str(result.message)
    assert attempts[1].wait().cause is Cause.COMPLETED, attempts[1].logs()
    assert (attempts[1].report().verdict, attempts[1].report().base.step) == ("exact", 7)
    assert not clean.attempts[0].notes(), clean.attempts[0].notes()

    assert killed.wait().cause is Cause.RANK_KILLED
    [told] = [m for rank in (0, 1) for m in killed.notes(rank)]
    wanted = "scheduler changed after checkpoint() in the same loop body"
    assert told.type == "changed-behind-checkpoint" and wanted in told.message
    source = read_manifest(warned.newest())
    fork = make("fork", LATE, "late", killed=False, strict=False)
    root = ForkSource(job_root=str(warned.paths.root), step=source.step, attempt=source.attempt, digest=source.digest)
    for attempt in (warned.launch(), fork.launch(fork=root)):
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        report = attempt.report()
        assert (report.verdict, report.base.step) == ("not-exact", 7)
        assert all(wanted in str(c.reason) for c in report.components if c.component == "checkpoint")


def test_parameter_that_an_evaluation_changes_after_checkpoint_call_makes_resume_not_exact(make: Any) -> None:
    """The change stays in the model, and the checkpoint lacks it."""
    job = make("changing", LATE, "changing", strict=False)
    attempt = resumed(job)
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    [told] = [m for rank in (0, 1) for m in job.attempts[0].notes(rank)]
    assert told.type == "changed-behind-checkpoint" and told.message.startswith("model changed after checkpoint()")
    assert (attempt.report().verdict, attempt.report().base.step) == ("not-exact", 7)
    assert "model changed after checkpoint()" in _of_checkpoint(attempt)


def test_checkpoint_call_in_mid_step_makes_resume_not_exact(make: Any) -> None:
    whole, cut = make("whole", MIDDLE, "nothing", killed=False), make("cut", MIDDLE, "nothing")
    undisturbed, attempt = whole.launch(), resumed(cut)
    assert undisturbed.wait().cause is attempt.wait().cause is Cause.COMPLETED, attempt.logs() + undisturbed.logs()
    assert (attempt.report().verdict, attempt.report().base.step) == ("exact", 7)
    found = compare(whole.newest(), cut.newest())
    assert found.identical, render(found)

    jobs = {
        ("batch taken", "data"): make("data", MIDDLE, "batch taken", strict=False),
        ("number drawn", "generators"): make("draw", MIDDLE, "number drawn", strict=False),
        ("scheduler stepped", "scheduler"): make("rate", MIDDLE, "scheduler stepped", strict=False),
    }
    attempts = [resumed(job) for job in jobs.values()]
    for (_, name), attempt in zip(jobs, attempts, strict=True):
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        assert (attempt.report().verdict, attempt.report().base.step) == ("not-exact", 7)
        assert f"{name} had advanced" in _of_checkpoint(attempt)


def test_stop_after_checkpoint_call_waits_for_end_of_loop_body(make: Any) -> None:
    """What an evaluation in it decides, too, is seen before the ranks stop; without effect, the resume is exact."""
    late, still = make("late", BEHIND, "held", "late", strict=False), make("still", BEHIND, "held", "still")
    firsts = [job.launch() for job in (late, still)]
    for attempt in firsts:
        place = attempt.job.home.home.parent
        wait_for(lambda at=place: all((at / f"held.{r}").exists() for r in (0, 1)), f"the hold\n{attempt.logs()}", 60)
        attempt.control(desired=Desired.SUSPEND)
        attempt.wait_freeze(0)
        (place / "go").touch()
    for attempt in firsts:
        result = attempt.wait()
        assert (result.cause, result.last_step) == (Cause.API_SUSPEND, 7), attempt.logs()
        assert "loss" in attempt.metrics()[7]
    notes = [m.type for job in (late, still) for rank in (0, 1) for m in job.attempts[0].notes(rank)]
    assert notes == ["changed-behind-checkpoint"]

    again, exact = [job.launch() for job in (late, still)]
    for attempt in (again, exact):
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        assert attempt.report().base.step == 7
    assert (again.report().verdict, exact.report().verdict) == ("not-exact", "exact")
    assert "scheduler changed after checkpoint()" in _of_checkpoint(again)


def test_kill_after_checkpoint_call_makes_resume_not_exact(make: Any) -> None:
    """Where nobody has seen what the rest of the body would have changed."""
    job, strict = make("warn", BEHIND, "killed", "late", strict=False), make("strict", BEHIND, "killed", "late")
    first, refused = job.launch(), resumed(strict)
    result = refused.wait()
    assert result.cause is Cause.USER_ERROR and "call checkpoint() last" in str(result.message), refused.logs()

    assert first.wait().cause is Cause.RANK_KILLED
    source = read_manifest(job.newest())
    fork = make("fork", BEHIND, "", "late", killed=False, strict=False)
    root = ForkSource(job_root=str(job.paths.root), step=source.step, attempt=source.attempt, digest=source.digest)
    for attempt in (fork.launch(fork=root), job.launch()):
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        assert (attempt.report().verdict, attempt.report().base.step) == ("not-exact", 7)
        assert "attempt 1 did not reach the end of the loop body" in _of_checkpoint(attempt)
    assert "attempt 1 did not reach the end" in str(read_changed_marker(job.paths.checkpoint(7, 1)))


def _of_checkpoint(attempt: Attempt) -> str:
    return str(next(c.reason for c in attempt.report().components if c.component == "checkpoint"))
