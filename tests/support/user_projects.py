"""A user's directory for tests: a task and a script of their own beside modules that are named like parts of Ratchet."""

from __future__ import annotations

from pathlib import Path

TASK = '''
"""A small net with BatchNorm and dropout, and ways to misbehave that tests ask for."""
import time
from pathlib import Path

import torch
from torch import nn

import hooks    # the user's own, beside this file
import service
import worker
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Numbers:
    def __init__(self, n):
        g = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 12, generator=g)
        self.y = (self.x[:, :3].sum(1) > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def net():
    return nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 32), nn.ReLU(),
                         nn.Linear(32, 2))


class Mine:
    """``gate``: a directory; a file in it named like a place holds everybody there (build, step, batch)."""

    def __init__(self, steps=24, evaluate_every=None, gate=None, diverge_at=None, uneven=False):
        assert (hooks.OWNER, worker.OWNER, service.OWNER) == ("user", "user", "user")
        self.steps, self.evaluate_every, self.diverge_at, self.uneven = steps, evaluate_every, diverge_at, uneven
        self.gate = Path(gate) if gate else None

    def wait(self, place):
        if self.gate is None:
            return
        (self.gate / f"{place}.reached.{self.rank}").touch()
        while (self.gate / place).exists():
            time.sleep(0.01)

    def build(self, ctx):
        self.rank = ctx.rank
        self.wait("build")
        model = net()
        data = TrainLoader(Numbers(100), batch_size=8, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Parts(model, optimizer, data, total_steps=self.steps + self.uneven * ctx.rank, evaluate_every=self.evaluate_every,
                     scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x + 0.01 * torch.randn_like(x)), y)

    def before_step(self, model, optimizer, step):
        self.wait(f"step{step}")
        if step == self.diverge_at and self.rank == 1:
            with torch.no_grad():
                model[0].bias[0] += 1e-6

    def evaluation(self):
        if self.evaluate_every is None:
            return
        data = Numbers(40)
        for i in range(self.rank, 40, 10):
            self.wait("batch")
            torch.rand(3)
            yield data.x[i : i + 5], data.y[i : i + 5]

    def evaluate(self, model, batch):
        x, y = batch
        return {"right": (float((model(x).argmax(1) == y).sum()), float(len(y)))}
'''

SCRIPT = '''
"""The user keeps the loop."""
import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mine import Numbers, net
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session import Session


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--hold", type=int, nargs="*", default=[])
    parser.add_argument("--gate")
    parser.add_argument("--hold-evaluation", type=int)
    parser.add_argument("--hold-end", action="store_true")
    parser.add_argument("--end", choices=["top", "bottom"])
    args = parser.parse_args()
    with Session() as s:
        data = TrainLoader(Share(100, s.rank), batch_size=8, seed=s.seed, rank=s.rank, world_size=s.world_size)
        module = net()
        model = s.wrap(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        noise = np.random.default_rng(s.rank)
        average = {"weight": torch.zeros(48, 12)}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
        s.register(optimizer=optimizer, scheduler=plateau, data=data, noise=noise, average=Average(average))
        batches = s.batches()
        for step in s.steps(None if args.end else args.steps):
            if args.end == "top" and step == args.steps:
                break
            x, y = next(batches)
            loss = nn.functional.cross_entropy(model(x + 0.01 * float(noise.standard_normal())), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average["weight"] = 0.9 * average["weight"] + 0.1 * module[0].weight.detach()
            s.log({"loss": loss})
            if step in args.hold:
                hold(args.gate, step, s.rank)
            if (step + 1) % 8 == 0:
                with s.evaluation() as ev:
                    right = total = 0
                    for i in ev.batches(range(s.rank, 20, s.world_size)):
                        right += int(module(torch.ones(2, 12) * i / 20).argmax(1).sum())
                        total += 2
                    if args.gate and step + 1 == args.hold_evaluation:
                        hold(args.gate, "evaluation", s.rank)
                    found = ev.averages({"right": (right, total)})
                s.log(found)
                plateau.step(found["right"])
                module[1].eval()    # the running statistics are frozen from here on
            if args.end == "bottom" and step + 1 == args.steps:
                break
        assert s.all_gather(s.rank) == list(range(s.world_size))
        if args.hold_end and s.rank == 1:
            hold(args.gate, "end", s.rank)
    print("after the loop", flush=True)


def hold(gate, place, rank):
    Path(gate, f"held{place}.{rank}").touch()
    while not Path(gate, f"go{place}").exists():
        time.sleep(0.01)


class Share(Numbers):
    """Each rank names its own data, and draws noise from a generator that only the data set knows."""

    def __init__(self, n, rank):
        super().__init__(n)
        self.rank = rank
        self.own = torch.Generator().manual_seed(rank)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(x.shape, generator=self.own), y

    def digest(self):
        return f"share of rank {self.rank}"


class Average:
    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values.update(state)


if __name__ == "__main__":
    main()
'''


def make_project(directory: Path) -> Path:
    """Write the project below ``directory``; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("hooks", "worker", "service"):
        (directory / f"{name}.py").write_text('OWNER = "user"\n')
    (directory / "mine.py").write_text(TASK)
    (directory / "train.py").write_text(SCRIPT)
    return directory
