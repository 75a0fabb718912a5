"""Handwritten digits under DistributedDataParallel: an ordinary training loop.

ratchet submit train.yaml --follow
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ratchet import Session


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
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], device: torch.device) -> float:
    """Over all ranks."""
    model.eval()
    right = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, labels in loader:
            found = model(images.to(device)).argmax(1) == labels.to(device)
            right += torch.tensor([float(found.sum()), len(labels)], device=device)
    model.train()
    dist.all_reduce(right)
    return float(right[0] / right[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    session = Session()  # starts the process group
    device = session.device
    torch.manual_seed(0)
    train, test = load_digits()
    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train), num_workers=1)
    test_loader = DataLoader(test, batch_size=90, sampler=DistributedSampler(test, shuffle=False))
    model = make_net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    model, optimizer, scheduler, loader = session.prepare(model, optimizer, scheduler, loader)

    for epoch in session.epochs(args.epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss})
        scheduler.step()
        print(f"epoch {epoch}: test accuracy {accuracy(model, test_loader, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
