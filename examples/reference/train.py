"""A loop of one's own under a Session, with every call that a Session has: ``script: [train.py]`` in the spec."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ratchet import Session, TrainLoader


def numbers(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(1) > 0).long()


def main() -> None:
    with Session() as session:
        data = TrainLoader(
            TensorDataset(*numbers(256, seed=1)),
            batch_size=32,
            seed=session.seed,
            rank=session.rank,
            world_size=session.world_size,
        )
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        net.seen = []  # a note that training does not read
        model = session.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        noise = torch.Generator().manual_seed(session.seed + session.rank)
        session.register(optimizer=optimizer, scheduler=scheduler, data=data, noise=noise)
        session.ignore("model.seen", "a note for people")
        session.restore(total_steps=40)
        print(f"rank {session.rank} of {session.world_size} on {session.device} begins behind step {session.step}")
        batches = session.batches()
        held_back = numbers(64, seed=2)
        for step in session.steps(40):
            x, y = next(batches)
            x = x + 0.01 * torch.randn(x.shape, generator=noise)
            loss = nn.functional.cross_entropy(model(x.to(session.device)), y.to(session.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            session.log({"loss": loss, "lr": scheduler.get_last_lr()[0]})
            if (step + 1) % 20 == 0:
                largest = max(session.all_gather(float(loss)))
                with session.evaluation() as ev:
                    right = total = 0
                    for x, y in ev.batches([held_back]):
                        right += int((net(x.to(session.device)).argmax(1).cpu() == y).sum())
                        total += len(y)
                    session.log(ev.averages({"accuracy": (right, total)}) | {"largest_loss": largest})
            if step == 30 and session.rank == 0:
                session.alert("three quarters are done", f"loss {float(loss):.3f}")
            if step == 24:
                session.checkpoint()
        session.finish()  # the end of the `with` block would do it, too


if __name__ == "__main__":
    main()
