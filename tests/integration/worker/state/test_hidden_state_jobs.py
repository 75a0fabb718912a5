"""Jobs whose code keeps state outside ``state_dict``, killed and resumed: the same bits, or the path in the resume report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.launch import Job

TASK = '''
import os, random, signal, time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from torch import nn
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


COUNT, SHOWN = 0, []


class Bank:
    def __init__(self):
        self.keys, self.at, self.seen = torch.zeros(4, 4), 0, set()

    def push(self, row):
        self.keys[self.at % 4] = row
        self.at += 1
        self.seen.add(self.at)
        return self.keys.mean(0) + len(self.seen) / 100


class Net(nn.Module):
    """Each piece of state moves the loss."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.noise = torch.Generator().manual_seed(1)
        self.numpy_noise, self.python_noise = np.random.default_rng(2), random.Random(3)
        self.level, self.scale, self.table = np.float32(0.5), np.ones(4, np.float32), {"drift": 0.0}
        self.window, self.history = deque(maxlen=3), [0.0] * 1000
        self.bank, self.config = Bank(), SimpleNamespace(rate=1.0)
        self.teacher = [nn.Linear(4, 4)]
        self.last = self.calls = None

    def forward(self, x):
        self.calls = (self.calls or 0) + 1
        self.level = np.float32(self.level * 0.9)
        self.scale *= 1.01
        self.table["drift"] += 0.1
        self.config.rate *= 0.95
        y = self.layer(x) + torch.randn(x.shape, generator=self.noise) * float(self.level)
        y = y + float(self.numpy_noise.normal()) + self.python_noise.random() + torch.from_numpy(self.scale.copy())
        self.window.append(float(y.detach().mean()))
        self.history[3] += self.window[0] / 10
        y = y + sum(self.window) + self.history[3] + self.table["drift"] + self.config.rate + self.calls / 10
        y = self.norm(y + self.bank.push(y.detach().mean(0)))
        if self.last is not None:
            y = y + self.last.mean()
        self.last = y.detach().clone()
        with torch.no_grad():
            target = self.teacher[0](x)
            for p, q in zip(self.teacher[0].parameters(), self.layer.parameters()):
                p.lerp_(q, 0.1)
        return (y - target).square().mean()


class Counting(torch.optim.SGD):
    """Warms up by a counter of its own, which no state_dict has."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.t, self.rates = 0, []

    def step(self, closure=None):
        self.t += 1
        self.rates.append(min(1.0, self.t / 10) * 0.05)
        for group in self.param_groups:
            group["lr"] = self.rates[-1]
        return super().step(closure)


class Samples(torch.utils.data.Dataset):
    """Counts what it gave, and keeps it."""

    def __init__(self):
        self.given, self.kept = 0, {}

    def __len__(self):
        return 64

    def __getitem__(self, number):
        self.given += 1
        self.kept.setdefault(number, self.given)
        return torch.full((4,), self.given / 50 + self.kept[number] / 70 + number / 64)


class Hiding:
    def __init__(self, flag, extra=""):
        self.flag, self.extra = Path(flag), extra
        self.losses = []

    def build(self, context):
        torch.manual_seed(1)
        self.net = Net()
        if self.extra == "iterator":
            self.net.moving = iter(range(1000))
        self.optimizer = Counting(self.net.parameters(), lr=0.1, momentum=0.9)
        data = TrainLoader(Samples(), batch_size=4, seed=3, rank=context.rank, world_size=context.world_size)
        return Parts(model=self.net, optimizer=self.optimizer, train=data, total_steps=14)

    def loss(self, model, batch):
        import rich.style  # draws from random when it is imported, which a resumed attempt does again

        global COUNT
        SHOWN.append(len(SHOWN))
        if self.extra == "iterator":
            next(self.net.moving)
            COUNT += 1
        if self.optimizer.t == 9 and not self.flag.exists():
            end = time.monotonic() + 30
            while not list(self.flag.parent.glob("job/jobs/*/checkpoints/*/MANIFEST.json")):
                assert time.monotonic() < end, "nothing was saved"
                time.sleep(0.01)
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch)
        self.losses.append(float(loss.detach()))
        return loss + sum(self.losses) / 100 * loss.detach()
'''


def run(home: Path, *, killed: bool, strict: bool = False, **arguments: Any) -> Job:
    code = home / "code"
    code.mkdir(parents=True)
    (code / "hiding.py").write_text(TASK)
    flag = home / "flag"
    if not killed:
        flag.touch()
    spec = {
        "task": {"entrypoint": "hiding:Hiding", "args": {"flag": str(flag), **arguments}},
        "checkpoint": {"every_steps": 6, "first": "off", "ignore": {"hiding:SHOWN": "for show", "model.typo": "a log"}},
        "determinism": "strict" if strict else "warn",
    }
    return Job(home / "job", spec, code)


@pytest.fixture
def jobs(tmp_path: Path) -> Any:
    made: list[Job] = []

    def make(name: str, **options: Any) -> Job:
        made.append(run(tmp_path / name, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()


def test_hidden_state_of_a_killed_job_is_restored_exactly(jobs: Any) -> None:
    whole, cut = jobs("whole", killed=False, strict=True), jobs("cut", killed=True, strict=True)
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert cut.launch().wait().cause is Cause.RANK_KILLED
    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    report = attempt.report()
    assert report.verdict == "exact" and report.base.step == 6, report
    assert "hiding:SHOWN is ignored: for show" in report.notes
    assert "model.typo is ignored: a log; nothing was found there when the checkpoint was made" in report.notes
    told = [note.message for note in attempt.notes() if note.type == "ignored-not-found"]
    assert told == ["nothing was found at the ignored path model.typo"]
    found = compare(whole.newest(), cut.newest())
    assert found.identical, render(found)


def test_unsaveable_hidden_state_is_named_and_refused_under_strict(jobs: Any) -> None:
    job = jobs("warn", killed=True, extra="iterator")
    assert job.launch().wait().cause is Cause.RANK_KILLED
    attempt = job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    [reason, *_] = [c.reason for c in attempt.report().components if c.status == "not-exact"]
    assert "hiding:COUNT, model.moving changed in training and cannot be saved" in reason
    assert "kept = session.keep(COUNT=...)" in reason
    assert "session.ignore" in reason and "checkpoint.ignore" in reason
    attempt = jobs("strict", killed=False, strict=True, extra="iterator").launch()
    result = attempt.wait()
    assert result.cause is Cause.USER_ERROR and "model.moving" in str(result.message), attempt.logs()
