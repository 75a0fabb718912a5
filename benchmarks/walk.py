"""What the walk through attributes and variables takes of a training that saves every 50 steps, and of one that evaluates, for a
model of many modules.

One process and one thread. A round has a step of the model, a walk as at a save, what ``JobState.on_evaluation_begin`` does
before an evaluation between two steps (the same walk, and a copy of what it finds), and the evaluation of one batch. It gives one
share or ratio of each. ``RATCHET_BENCH_PAIRS`` (default 40): rounds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import torch
from torch import nn

from benchmarks.stats import estimate
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state.object_walk import Roots

EVERY_STEPS: Final = 50
LAYERS: Final = 62  # of 8 modules each


def lines() -> str:
    """``walk, averaged over every_steps: 50, % of a step`` and ``before an evaluation, ratio to a step``, with their 95 %
    intervals."""
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 32, 64)
    state = JobState(0, torch.device("cpu"), code=Path(__file__).parent)
    state.hidden.begin(Roots({"model": model, "optimizer": optimizer}))
    walks, shares, befores, ratios, batches = [], [], [], [], []
    for number in range(int(os.environ.get("RATCHET_BENCH_PAIRS", 40)) + 1):
        begun = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped = time.perf_counter()
        assert not state.hidden.changes().unsaved
        walked = time.perf_counter()
        state.on_evaluation_begin()
        ready = time.perf_counter()
        with torch.no_grad():
            model.eval()(batch)
        evaluated = time.perf_counter()
        model.train()
        state.on_step_begin()
        if number:  # the first makes the optimizer's state
            walks.append((walked - stepped) * 1000)
            shares.append(100 * (walked - stepped) / (EVERY_STEPS * (stepped - begun)))
            befores.append((ready - walked) * 1000)
            ratios.append((ready - walked) / (stepped - begun))
            batches.append((ready - walked) / (evaluated - ready))
    count = sum(1 for _ in model.modules())
    return (
        f"walk, averaged over every_steps: {EVERY_STEPS}, % of a step: {estimate(shares)}; "
        f"{estimate(walks)} ms for {count} modules\n"
        f"before an evaluation, ratio to a step: {estimate(ratios)}; to one batch that is evaluated: {estimate(batches)}; "
        f"{estimate(befores)} ms"
    )


if __name__ == "__main__":
    print(lines())
