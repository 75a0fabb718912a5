"""Handwritten digits under DistributedDataParallel, gradients compressed by PowerSGD, with a loop of its own.

ratchet submit train.yaml --follow
"""

import argparse
import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from ratchet import Session, TrainLoader


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1797 images of 8 x 8 pixels, every fifth of them for the test; read without importing scikit-learn."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    images = torch.tensor(table[:, :64] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(table[:, 64], dtype=torch.int64)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def report(net: nn.Module, test: TensorDataset, device: torch.device) -> None:
    """Accuracy, and a digest of the weights: two runs that print the same one ended in the same bits."""
    images, labels = (tensor.to(device) for tensor in test.tensors)
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).float().mean().item()
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in net.state_dict().values())
    print(f"test accuracy {accuracy:.4f}, weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    with Session() as session:
        torch.manual_seed(0)
        train, test = load_digits()
        data = TrainLoader(train, batch_size=32, seed=0, rank=session.rank, world_size=session.world_size)
        net = make_net()
        model = session.wrap(net)  # on this rank's device, under the hook of the spec
        optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
        session.register(optimizer=optimizer, data=data)
        batches = session.batches()
        for _ in session.steps(args.epochs * data.steps_per_epoch):
            images, labels = next(batches)
            loss = cross_entropy(model(images.to(session.device)), labels.to(session.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss})
        if session.rank == 0:
            report(net, test, session.device)


if __name__ == "__main__":
    main()
