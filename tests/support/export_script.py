"""A script with all that an export has to get right; every rank leaves what plain PyTorch would have saved of it."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from ratchet_worker.session.session import Session


class Net(nn.Module):
    """A tied parameter, a frozen one of 16 bits, channels-last weights, a buffer that is not persistent, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 36, 16)
        self.inner = nn.Linear(16, 16, bias=False)
        self.outer = nn.Linear(16, 16, bias=False)
        self.outer.weight = self.inner.weight
        self.table = nn.Parameter(torch.randn(16, 4).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        return self.outer(torch.relu(self.inner(x))) @ self.table.float()


class Versioned(Net):
    """And with extra state, which safetensors' own loader does not know."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def main(out: str, steps: int) -> None:
    with Session() as s:
        torch.manual_seed(1)
        net = Versioned()
        model = s.wrap(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        s.register(optimizer=optimizer)
        if s.step == 0:
            s.restore()
            torch.save(net.state_dict(), os.path.join(out, f"begin-{s.rank}.pt"))  # noqa: PTH118
        generator = torch.Generator().manual_seed(100 + s.rank)
        for step in s.steps(steps):
            x = torch.randn(4, 3, 8, 8, generator=generator)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == steps - 1:
                hook = s._runtime.state.hook
                assert hook is not None
                state = getattr(hook._algorithm, "state", None)
                found = state.__getstate__() if isinstance(state, PowerSGDState) else None
                if found is not None:
                    found |= {"rng": found["rng"].get_state()}  # read with weights_only
                torch.save(
                    {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "state": found},
                    os.path.join(out, f"end-{s.rank}.pt"),  # noqa: PTH118
                )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
