"""A small language model over bytes: batches from a memmap, drawn one ahead, accumulated gradients, a learning rate by hand.

ratchet submit train.yaml --follow
"""

import argparse
import math
import typing

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from ratchet import Session

TEXT = str(typing.__file__)
BATCH, LENGTH, ACCUMULATE, WARMUP, EVALUATE_EVERY = 8, 32, 2, 5, 5


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.block(hidden, src_mask=mask, is_causal=True))


def get_batch(split, device):
    data = np.memmap(TEXT, dtype=np.uint8, mode="r")
    data = data[: len(data) * 9 // 10] if split == "train" else data[len(data) * 9 // 10 :]
    at = torch.randint(len(data) - LENGTH, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in at])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss(model, device):
    model.eval()
    losses = []
    for _ in range(4):
        x, y = get_batch("test", device)
        losses.append(cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    model.train()
    return sum(losses) / len(losses)


def learning_rate(step, steps, top):
    if step < WARMUP:
        return top * (step + 1) / (WARMUP + 1)
    return top * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.003)
    args = parser.parse_args()

    session = Session()  # starts the process group
    device = session.device
    rank = dist.get_rank()
    torch.manual_seed(1337 + rank)
    net = Model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95))
    model, optimizer = session.prepare(net, optimizer)
    x, y = get_batch("train", device)
    best = math.inf

    step = 0
    kept = session.keep(best=best, x=x, y=y)
    for step in session.steps(args.steps):
        best, x, y = kept.best, kept.x, kept.y
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        if step % EVALUATE_EVERY == 0 and rank == 0:
            found = estimate_loss(net, device)
            print(f"step {step}: loss {found:.4f}", flush=True)
            if found < best:
                save_file(net.state_dict(), f"best-{step}.safetensors")
            best = min(best, found)
        for micro in range(ACCUMULATE):
            model.require_backward_grad_sync = micro == ACCUMULATE - 1
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUMULATE
            x, y = get_batch("train", device)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        kept.best, kept.x, kept.y = best, x, y
    if rank == 0:
        save_file(net.state_dict(), "last.safetensors")
    dist.barrier()


if __name__ == "__main__":
    main()
