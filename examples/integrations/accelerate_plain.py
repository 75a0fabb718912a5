"""Handwritten digits as sequences of 64 tokens, read by a small transformer: an ordinary script with Accelerate.

torchrun --nproc-per-node 2 accelerate_plain.py --epochs 10
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1797 images of 8 x 8 pixels, 17 shades; every fifth of them for the test."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn"
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    tokens, labels = torch.tensor(table[:, :64], dtype=torch.int64), torch.tensor(table[:, 64], dtype=torch.int64)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(tokens[~test], labels[~test]), TensorDataset(tokens[test], labels[test])


class Reader(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(17, width), nn.Parameter(torch.randn(64, width) / 8)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.tokens(tokens) + self.places).mean(1))
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.005)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(0)
    train, test = load_digits()
    loader, test_loader = DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(loader) // accelerator.gradient_accumulation_steps
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for tokens, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(tokens), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss.item()})
        model.eval()
        right = []
        for tokens, labels in test_loader:
            with torch.no_grad():
                right.append(accelerator.gather_for_metrics(model(tokens).argmax(1) == labels))
        accelerator.print(f"epoch {epoch}: test accuracy {torch.cat(right).float().mean():.4f}", flush=True)
        accelerator.save_state(f"epoch-{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
