"""PyTorch's end-to-end example of saving and reloading a PowerSGD state, as a script that may be killed at any step.

The example is at the end of "DDP Communication Hooks" of torch's documentation, whose model this is. There rank 0 saves model,
hook and hook state once, and all ranks load that. Trained for longer than it is, that recipe goes wrong, and no error tells:

- the residuals (error feedback) differ from rank to rank, and those of all ranks but 0 are lost;
- they belong to positions in DDP's buckets, and a new DDP forms other buckets: wrong sums, or a size that does not fit;
- neither the optimizer nor the order of the data nor any generator is in the file;
- it is a pickle, which runs whatever is in it; ``weights_only=True`` refuses a PowerSGDState.

Here all of that is in every checkpoint, per rank, without a pickle: ``ratchet submit examples/hooks/save-reload.yaml --wait``.
Kill what you like meanwhile, and compare the digest in the last line of rank 0's log.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ratchet import Session, TrainLoader


class SimpleModel(nn.Module):
    """PowerSGD of rank 1 sends 48 numbers for the 576 of the first weight, 36 for the 288 of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.relu(self.fc1(x)))
        return out


def samples(count: int = 2048) -> TensorDataset:
    """Inputs, and what a fixed linear map with noise makes of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 24, generator=generator)
    targets = inputs @ torch.randn(24, 12, generator=generator) + 0.1 * torch.randn(count, 12, generator=generator)
    return TensorDataset(inputs, targets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    steps: int = parser.parse_args().steps
    with Session() as session:
        torch.manual_seed(session.seed)
        model = SimpleModel()
        ddp = session.wrap(
            model
        )  # under the hook of the spec; what its state holds is saved and restored on every rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        data = TrainLoader(
            samples(), batch_size=16, seed=session.seed, rank=session.rank, world_size=session.world_size
        )
        session.register(optimizer=optimizer, data=data)
        batches = session.batches()
        for _ in session.steps(steps):
            inputs, targets = (tensor.to(session.device) for tensor in next(batches))
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log({"loss": loss})
        if session.rank == 0:
            weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
            print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
