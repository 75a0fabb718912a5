"""A script with a loop of its own: ``script: ["train.py", "--epochs", "30"]`` in the spec. See ``ratchet.Session``."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from hooks import clip_gradients
from ratchet import Session, TrainLoader
from service import correct
from worker import Tumours, jitter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    with Session() as session:
        data = TrainLoader(
            Tumours(train=True), batch_size=16, seed=session.seed, rank=session.rank, world_size=session.world_size,
            augment=jitter,
        )  # fmt: skip
        net = nn.Sequential(
            nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        model = session.wrap(net)  # on the right device, in DDP, under the hook of the spec
        optimizer = torch.optim.SGD(net.parameters(), lr=options.lr, momentum=0.9)
        total = options.epochs * data.steps_per_epoch
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
        session.register(optimizer=optimizer, scheduler=scheduler, data=data)  # whatever has state
        batches = session.batches()
        for step in session.steps(total):  # after an interruption: from where it stopped
            inputs, labels = (part.to(session.device) for part in next(batches))
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            clip_gradients(net, max_norm=5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.log({"loss": loss, "accuracy": correct(scores, labels) / len(labels)})
            if (step + 1) % data.steps_per_epoch == 0:
                test_accuracy(session, net)


def test_accuracy(session: Session, net: nn.Module) -> None:
    """Accuracy over all ranks' shares of the test data; leaves no trace in the training."""
    test = Tumours(train=False)
    mine = slice(session.rank, None, session.world_size)
    with session.evaluation() as evaluation:
        scores = net(test.inputs[mine].to(session.device))
        labels = torch.tensor(test.labels[mine], device=session.device)
        shares = {"test_accuracy": (float(correct(scores, labels)), float(len(labels)))}
        session.log(evaluation.averages(shares))


if __name__ == "__main__":
    main()
