"""What the walk through attributes and variables takes of a training that saves every 50 steps, for a model of many modules.

One process and one thread. The walk takes turns with a step of the same model, and a round gives one share: the time of a walk by
that of 50 steps. ``RATCHET_BENCH_PAIRS`` (default 40): rounds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import torch
from torch import nn

from benchmarks.stats import estimate
from ratchet_worker.hidden_state import HiddenState

EVERY_STEPS: Final = 50
LAYERS: Final = 62  # of 8 modules each


def line(layers: int = LAYERS) -> str:
    """``walk, averaged over every_steps: 50, % of a step``, with its 95 % interval."""
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 32, 64)
    hidden = HiddenState(Path(__file__).parent)
    hidden.begin({"model": model, "optimizer": optimizer})
    walks, shares = [], []
    for number in range(int(os.environ.get("RATCHET_BENCH_PAIRS", 40)) + 1):
        begun = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped = time.perf_counter()
        assert not hidden.changes().unsaved
        walked = time.perf_counter()
        if number:  # the first makes the optimizer's state
            walks.append((walked - stepped) * 1000)
            shares.append(100 * (walked - stepped) / (EVERY_STEPS * (stepped - begun)))
    count = sum(1 for _ in model.modules())
    share = f"walk, averaged over every_steps: {EVERY_STEPS}, % of a step: {estimate(shares)}"
    return f"{share}; {estimate(walks)} ms for {count} modules"


if __name__ == "__main__":
    print(line())
