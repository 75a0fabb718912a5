"""Handwritten digits with Accelerate, as a job: killed, preempted or suspended, it goes on bit for bit.

ratchet submit accelerate_train.yaml --follow
"""

import argparse
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from ratchet import Session, TrainLoader
from ratchet_worker.integrations.accelerate import prepare


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1797 images of 8 x 8 pixels, every fifth of them for the test; read without importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    images, labels = (
        torch.tensor(table[:, :64] / 16, dtype=torch.float32),
        torch.tensor(table[:, 64], dtype=torch.int64),
    )
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    train, test = load_digits()
    with Session() as session:
        accelerator = Accelerator(cpu=session.device.type == "cpu", gradient_accumulation_steps=2)
        data = TrainLoader(train, batch_size=32, seed=session.seed, rank=session.rank, world_size=session.world_size)
        session.register(data=data)
        net = nn.Sequential(
            nn.Linear(64, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        sgd = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
        decay = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.999)
        model, optimizer, scheduler = prepare(session, accelerator, net, sgd, decay)
        batches = session.batches()
        for _ in session.steps(args.epochs * data.steps_per_epoch // 2):
            for images, labels in islice(batches, 2):
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(images.to(accelerator.device)), labels.to(accelerator.device))
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            session.log({"loss": loss})
        if session.rank == 0:
            images, labels = (tensor.to(session.device) for tensor in test.tensors)
            net.eval()
            accuracy = (net(images).argmax(1) == labels).float().mean().item()
            print(f"test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
