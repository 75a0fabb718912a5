"""``prepare_loader`` refuses exactly the loaders whose ranks would have different numbers of batches."""

from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset

from ratchet_contract.errors import UserError
from ratchet_worker.integrations.data_loader_shard import prepare_loader


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("samples", [8, 12, 13, 16, 24, 27, 28, 29])
def test_uneven_batches_are_refused_only_if_ranks_get_different_numbers(samples: int, split: bool) -> None:
    def loader(rank: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        return prepare_data_loader(
            DataLoader(TensorDataset(torch.zeros(samples)), batch_size=8),
            num_processes=2, process_index=rank, split_batches=split, even_batches=False, put_on_device=False,
        )  # fmt: skip

    shards = [loader(rank).batch_sampler for rank in range(2)]
    assert all(isinstance(shard, BatchSamplerShard) for shard in shards)
    numbers = [sum(1 for _ in shard) for shard in shards]
    if numbers[0] == numbers[1]:
        prepare_loader(loader(0))
    else:
        with pytest.raises(UserError, match="leave it at True"):
            prepare_loader(loader(0))
