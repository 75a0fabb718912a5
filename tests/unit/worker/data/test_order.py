"""The order of the data: pure, the same on every machine, every sample once, parts of equal size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet_contract.errors import UserError
from ratchet_worker.data.order import BatchRule, derive_seed, epoch_order, shard


def test_epoch_order_matches_published_values() -> None:
    """Frozen values: another machine, NumPy or Python must give these, or old checkpoints could not go on."""
    assert epoch_order(10, 0, 0).tolist() == [7, 8, 1, 9, 0, 6, 5, 3, 2, 4]
    assert epoch_order(10, 0, 1).tolist() == [4, 2, 5, 6, 1, 3, 8, 0, 7, 9]
    assert derive_seed("sample", 1, 2, 3) == 14915592600209263007


@given(length=st.integers(1, 500), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_epoch_order_is_a_permutation_independent_of_global_state(length: int, seed: int, epoch: int) -> None:
    np.random.seed(0)
    first = epoch_order(length, seed, epoch)
    np.random.seed(1)
    assert np.array_equal(first, epoch_order(length, seed, epoch))
    assert sorted(first.tolist()) == list(range(length))


def test_epoch_order_varies_with_seed_and_epoch_uniformly() -> None:
    orders = [epoch_order(20, seed, epoch) for seed in range(40) for epoch in range(50)]
    assert len({tuple(o.tolist()) for o in orders}) == len(orders)
    counts = np.stack([np.bincount([o[place] for o in orders], minlength=20) for place in range(20)])
    expected = len(orders) / 20
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 361 + 5 * np.sqrt(2 * 361)  # 19 * 19 degrees of freedom


@given(
    length=st.integers(1, 300),
    batch=st.integers(1, 20),
    world=st.integers(1, 5),
    position_in_batches=st.integers(0, 400),
)
def test_ranks_split_each_global_batch_into_equal_parts_without_overlap(
    length: int, batch: int, world: int, position_in_batches: int
) -> None:
    if length < batch * world:
        with pytest.raises(UserError, match="smaller batch_size"):
            BatchRule(length, batch, "per_rank", 0, world)
        return
    rules = [BatchRule(length, batch, "per_rank", rank, world) for rank in range(world)]
    seen: list[int] = []
    for n in range(rules[0].batches_per_epoch):
        for rule in rules:
            start = rule.start(n * rule.global_batch)
            seen += range(start, start + rule.per_rank)
    assert seen == list(range(length - length % (batch * world)))  # in order, once, and only the remainder is dropped
    left = rules[0].batches_left(position_in_batches * rules[0].global_batch)
    assert left == max(0, rules[0].batches_per_epoch - position_in_batches)


def test_batch_is_decides_fixed_batch_size_when_world_changes() -> None:
    assert [BatchRule(100, 12, "per_rank", 0, w).global_batch for w in (1, 2, 3)] == [12, 24, 36]
    assert [BatchRule(100, 12, "global", 0, w).global_batch for w in (1, 2, 3)] == [12, 12, 12]
    assert [BatchRule(100, 12, "global", 0, w).per_rank for w in (1, 2, 3)] == [12, 6, 4]
    with pytest.raises(UserError, match="multiple of 5"):
        BatchRule(100, 12, "global", 0, 5)


@given(length=st.integers(0, 100), world=st.integers(1, 7))
def test_shards_of_evaluation_data_hold_every_sample_once(length: int, world: int) -> None:
    parts = [shard(length, rank, world) for rank in range(world)]
    assert [i for part in parts for i in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
