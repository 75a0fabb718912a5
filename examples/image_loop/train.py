"""A classifier of images with train() and validate(), meters, StepLR and the best weights of all epochs.

ratchet submit train.yaml --follow
"""

import argparse

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ratchet import Session


class Stripes(Dataset[tuple[torch.Tensor, int]]):
    """Noisy stripes in four directions; half of them are flipped at random, as they are loaded."""

    def __init__(self, first: int, count: int, flip: bool) -> None:
        self.first, self.count, self.flip = first, count, flip

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(self.first + index))
        rows, columns = torch.arange(8).view(8, 1), torch.arange(8).view(1, 8)
        kind = index % 4
        stripes = ((rows, columns, rows + columns, rows - columns)[kind] % 2).expand(8, 8)
        image = stripes + 0.8 * noise
        return (image.flip(2) if self.flip and torch.rand(()) < 0.5 else image), kind


class Meter:
    """A value and its average."""

    def __init__(self, name: str) -> None:
        self.name, self.value, self.sum, self.count = name, 0.0, 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.value = value
        self.sum += value * count
        self.count += count

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4f} ({self.sum / self.count:.4f})"


def train(loader, model, criterion, optimizer, epoch, device):
    losses, top1 = Meter("loss"), Meter("accuracy")
    model.train()
    for i, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        output = model(images)
        loss = criterion(output, labels)
        losses.update(loss.item(), len(labels))
        top1.update((output.argmax(1) == labels).float().mean().item(), len(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 4 == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch} [{i}/{len(loader)}] {losses} {top1}", flush=True)


def validate(loader, model, device):
    """Accuracy over all ranks."""
    top1 = Meter("accuracy")
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            found = model(images.to(device)).argmax(1) == labels.to(device)
            top1.update(found.float().mean().item(), len(labels))
    total = torch.tensor([top1.sum, top1.count], device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    session = Session()  # starts the process group
    device = session.device
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 4)
    ).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    train_set, test_set = Stripes(0, 192, flip=True), Stripes(1000, 64, flip=False)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 8, sampler=train_sampler, num_workers=1)
    model, optimizer, scheduler, train_loader = session.prepare(model, optimizer, scheduler, train_loader)
    test_loader = DataLoader(test_set, 16, sampler=DistributedSampler(test_set, shuffle=False))
    best = 0.0
    kept = session.keep(best=best)

    for epoch in session.epochs(args.epochs):
        best = kept.best
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device)
        accuracy = validate(test_loader, model, device)
        scheduler.step()
        is_best = accuracy > best
        best = max(accuracy, best)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
            save_file(model.module.state_dict(), "last.safetensors")
            if is_best:
                save_file(model.module.state_dict(), f"best-{epoch}.safetensors")
        kept.best = best
    dist.barrier()


if __name__ == "__main__":
    main()
