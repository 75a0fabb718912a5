"""Handwritten digits under DistributedDataParallel, gradients compressed by PowerSGD.

torchrun --nproc-per-node 2 train.py --epochs 10 --lr 0.1
"""

import argparse
import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path("checkpoint.pt")


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

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    train, test = load_digits()
    sampler: DistributedSampler[object] = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    net = make_net().to(device)
    model = DistributedDataParallel(net)
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10), powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)

    start = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            # What most scripts keep. The hook's state is not in it: PowerSGD starts over at every restart.
            saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(saved, CHECKPOINT.with_suffix(".tmp"))
            CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

    if rank == 0:
        report(net, test, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
