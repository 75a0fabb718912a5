"""Killed jobs under torch's schedulers and on complex parameters: the same bits, or a refusal within the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.launch import Job

TASK = '''
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.optim import lr_scheduler as rates
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Spectral(nn.Module):
    """A Fourier layer: complex weights."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) / 4)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.inner(x)) @ self.weight, n=6)


class Late:
    """State that appears in the first step, of a type that no checkpoint takes."""

    def __init__(self):
        self.found = None

    def state_dict(self):
        return {"found": self.found}

    def load_state_dict(self, state):
        self.found = state["found"]


def made(name, optimizer):
    if name == "MultiStepLR":
        return rates.MultiStepLR(optimizer, [2, 5, 5, 9])
    if name == "SequentialLR":
        return rates.SequentialLR(optimizer, [rates.LinearLR(optimizer), rates.MultiStepLR(optimizer, [2, 6])], [4])
    if name != "ChainedScheduler":
        return None
    return rates.ChainedScheduler([rates.ExponentialLR(optimizer, 0.9), rates.MultiStepLR(optimizer, [5])])


class Training:
    def __init__(self, flag, scheduler, late=False):
        self.flag, self.scheduler, self.late, self.step = Path(flag), scheduler, late, 0

    def build(self, context):
        torch.manual_seed(1)
        net = Spectral()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        data = TrainLoader(torch.randn(64, 6), batch_size=4, seed=3, rank=context.rank, world_size=context.world_size)
        self.object = Late()
        more = {"late": self.object} if self.late else {}
        return Parts(
            model=net, optimizer=optimizer, train=data, total_steps=12, scheduler=made(self.scheduler, optimizer), stateful=more
        )

    def loss(self, model, batch):
        self.step += 1
        self.object.found = object()
        if self.step == 8 and not self.flag.exists():
            end = time.monotonic() + 30
            while not list(self.flag.parent.glob("job/jobs/*/checkpoints/*/MANIFEST.json")):
                assert time.monotonic() < end, "nothing was saved"
                time.sleep(0.01)
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).square().mean()


class Free(Training):
    """Evaluates with weights that the optimizer switches to, and back."""

    def build(self, context):
        parts = super().build(context)
        import schedulefree

        parts.model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        if self.scheduler == "AdamWScheduleFree":
            parts.optimizer = schedulefree.AdamWScheduleFree(parts.model.parameters(), lr=0.01, warmup_steps=4)
        else:
            parts.optimizer = schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parts.model.parameters(), lr=0.05))
        parts.scheduler, parts.evaluate_every, self.optimizer = None, 3, parts.optimizer
        return parts

    def loss(self, model, batch):
        self.optimizer.train()
        return super().loss(model, batch)

    def evaluation(self):
        self.optimizer.eval()
        yield torch.ones(4, 6)
        self.optimizer.train()

    def evaluate(self, model, batch):
        return {"size": (float(model(batch).square().mean()), 1.0)}
'''


@pytest.fixture
def make(tmp_path: Path) -> Any:
    jobs: list[Job] = []

    def job(name: str, *, killed: bool, task: str = "Training", **arguments: Any) -> Job:
        code = tmp_path / name / "code"
        code.mkdir(parents=True)
        (code / "training.py").write_text(TASK)
        flag = tmp_path / name / "flag"
        if not killed:
            flag.touch()
        spec = {
            "task": {"entrypoint": f"training:{task}", "args": {"flag": str(flag), **arguments}},
            "checkpoint": {"every_steps": 6, "first": "off"},
            "determinism": "strict",
        }
        jobs.append(Job(tmp_path / name / "job", spec, code))
        return jobs[-1]

    yield job
    for one in jobs:
        one.close()


@pytest.mark.parametrize(
    "scheduler", ["MultiStepLR", "SequentialLR", "ChainedScheduler", "AdamWScheduleFree", "ScheduleFreeWrapper"]
)
def test_killed_job_with_scheduler_resumes_exactly(make: Any, scheduler: str) -> None:
    task = "Training"
    if "ScheduleFree" in scheduler:
        pytest.importorskip("schedulefree")
        task = "Free"
    whole, cut = (make(name, killed=name == "cut", scheduler=scheduler, task=task) for name in ("whole", "cut"))
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert cut.launch().wait().cause is Cause.RANK_KILLED
    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert attempt.report().verdict == "exact" and attempt.report().base.step == 6
    found = compare(whole.newest(), cut.newest())
    assert found.identical, render(found)


def test_unstorable_state_is_refused_after_the_first_step(make: Any) -> None:
    attempt = make("late", killed=False, scheduler="MultiStepLR", late=True).launch()
    result = attempt.wait()
    assert result.cause is Cause.USER_ERROR and result.last_step <= 1, attempt.logs()
    assert "user:late.found: a builtins.object cannot be stored" in str(result.message)
