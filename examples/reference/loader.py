"""What a TrainLoader does, in one process without a job: ``python loader.py``."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from ratchet import TrainLoader

samples = TensorDataset(torch.arange(10.0))
data = TrainLoader(samples, batch_size=2, seed=7, rank=0, world_size=2)
assert (data.steps_per_epoch, data.batch_is, data.exact, data.inexact_reason) == (2, "per_rank", True, None)

batches = iter(data)
first, second = next(batches), next(batches)
assert (data.epoch, data.position) == (1, 0)  # 2 steps of 2 ranks x 2 samples; the 2 that are left fill no step

state = data.state_dict()
again = TrainLoader(samples, batch_size=2, seed=7, rank=0, world_size=2)
again.load_state_dict(state)
assert torch.equal(next(iter(again))[0], next(iter(data))[0])

alone = TrainLoader(samples, batch_size=4, seed=7, rank=0, world_size=1)
alone.load_resized([state, state])  # one rank goes on where two were
assert (alone.epoch, alone.position) == (1, 0)

assert data.data_digest() is None  # a TensorDataset has no digest()
data.close()
