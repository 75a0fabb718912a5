"""A small convolutional net in a Session, compiled and in half precision where it is asked to be. Batches are made from the
step's number."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ratchet_worker.session.session import Session


class Recomputed(nn.Module):
    """Activation checkpointing: dropout draws in the forward pass, and the same again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def make_net(width: int, recompute: bool = False) -> nn.Module:
    drop = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), Recomputed(drop) if recompute else drop,
        nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--compile", help="back end of torch.compile")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing around dropout")
    parser.add_argument("--half", choices=("bfloat16", "float16"), help="autocast; float16 with a GradScaler")
    parser.add_argument("--hidden", action="store_true", help="noise of a generator that no checkpoint has")
    args = parser.parse_args()
    with Session() as session:
        torch.manual_seed(session.seed)
        net = make_net(args.width, args.recompute).to(session.device)
        if args.compile:
            net.compile(backend=args.compile)
        model = session.wrap(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        session.register(optimizer=optimizer, scheduler=scheduler)
        scaler = torch.amp.GradScaler(
            session.device.type, init_scale=2.0**12, growth_interval=10, enabled=args.half == "float16"
        )
        if scaler.is_enabled():
            session.register(scaler=scaler)
        hidden = torch.Generator().manual_seed(1)
        for step in session.steps(args.steps):
            draw = torch.Generator().manual_seed(1000 * step + session.rank)
            images = torch.randn(16, 3, 16, 16, generator=draw)
            labels = images.mean((2, 3)).argmax(1)
            if args.hidden:
                images += torch.randn(images.shape, generator=hidden)
            images, labels = images.to(session.device), labels.to(session.device)
            half = torch.autocast(session.device.type, dtype=getattr(torch, args.half)) if args.half else nullcontext()
            with half:
                logits = model(images)
            loss = cross_entropy(logits.float(), labels)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            session.log({"loss": loss})


if __name__ == "__main__":
    main()
