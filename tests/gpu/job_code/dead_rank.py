"""A Session whose rank 0 outlives rank 1: in the third step rank 1 does nothing, and rank 0 computes on its own, or waits for
rank 1 in a collective. (Over gloo such a wait fails as soon as rank 1 is dead, and rank 0 ends by itself.)"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from ratchet_worker.session.session import Session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank-0", choices=("computes", "waits"), required=True)
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args()
    with Session() as session:
        model = session.wrap(nn.Linear(args.width, args.width))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session.register(optimizer=optimizer)
        batch = torch.randn(args.width, args.width, device=session.device)
        for step in session.steps(1000):
            if step == 2:
                print("apart from the other rank", flush=True)
            if step == 2 and session.rank == 1:
                time.sleep(3600)
            while step == 2 and args.rank_0 == "computes":
                batch = torch.tanh(batch @ batch)
                if session.device.type == "cuda":
                    torch.cuda.synchronize()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
