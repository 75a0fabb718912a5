"""A small script with a Session; PLANT names what is wrong with it: generator, clock, healing, forgotten, counted."""

import os
import time

import torch
from torch import nn

from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session.session import Session

NOISE = torch.Generator().manual_seed(3)
PLANT = os.environ.get("PLANT")


class Numbers:
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(12, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 2)


def main() -> None:
    with Session() as s:
        net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
        model = s.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        if PLANT == "forgotten":  # without effect, which nobody can know
            idle = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        data = TrainLoader(Numbers(), batch_size=8, seed=s.seed, rank=s.rank, world_size=s.world_size)
        s.register(optimizer=optimizer, scheduler=scheduler, data=data)
        batches, calls = s.batches(), 0
        for step in s.steps(int(os.environ.get("STEPS", "200"))):
            x, y = next(batches)
            if PLANT == "generator":
                x = x + 0.1 * torch.randn(x.shape, generator=NOISE)
            if PLANT == "clock":
                x = x + time.time() % 1
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if PLANT == "forgotten":
                idle.step()
            if PLANT == "healing":  # a number that no checkpoint has, until the weights begin anew
                calls += 1
                with torch.no_grad():
                    for p in net.parameters():
                        p.add_(calls / 100) if step < 13 else p.zero_()
                        optimizer.state[p]["momentum_buffer"].zero_()
            optimizer.zero_grad()
            s.log({"time": time.time()} if PLANT == "healing" else {"loss": loss, "time": time.time()})
            if PLANT == "counted":  # a number that no checkpoint has, and only a metric depends on
                calls += 1
                s.log({"counted": calls})
            if (step + 1) % 8 == 0:
                with s.evaluation() as ev:
                    right = sum(int((net(x).argmax(1) == y).sum()) for x, y in ev.batches([(x, y)]))
                    found = ev.averages({"right": (float(right), float(len(y)))})
                s.log({} if PLANT == "healing" else found)


if __name__ == "__main__":
    main()
