"""Shared tensors are cut over the ranks so that every element is stored exactly once, by shares of equal size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet_store.format.shard_slices import Slice, plan_slices

SIZES = st.lists(st.tuples(st.integers(0, 200), st.sampled_from([1, 2, 4, 8])), max_size=12).map(
    lambda pairs: [(f"t{i}", numel, itemsize) for i, (numel, itemsize) in enumerate(pairs)]
)


@given(SIZES, st.integers(1, 9))
def test_every_element_belongs_to_exactly_one_rank_in_order(sizes: list[tuple[str, int, int]], world_size: int) -> None:
    plan = plan_slices(sizes, world_size)
    assert len(plan) == world_size
    flat = [piece for rank in plan for piece in rank]
    for name, numel, _ in sizes:
        pieces = [piece for piece in flat if piece.name == name]
        assert pieces[0].start == 0 and pieces[-1].stop == numel
        assert all(a.stop == b.start for a, b in pairwise(pieces))
        assert all(piece.stop > piece.start for piece in pieces) or pieces == [Slice(name, 0, 0)]
    order = [name for name, _, _ in sizes]
    assert [order.index(piece.name) for piece in flat] == sorted(order.index(piece.name) for piece in flat)


@given(SIZES, st.integers(1, 9))
def test_slices_give_ranks_equal_byte_shares(sizes: list[tuple[str, int, int]], world_size: int) -> None:
    itemsize = {name: size for name, _, size in sizes}
    total = sum(numel * size for _, numel, size in sizes)
    for rank in plan_slices(sizes, world_size):
        nbytes = sum((piece.stop - piece.start) * itemsize[piece.name] for piece in rank)
        assert abs(nbytes - total / world_size) < 8 + 1


def test_slices_split_large_tensor_and_keep_small_ones_whole() -> None:
    plan = plan_slices([("big", 10, 4), ("scalar", 1, 8), ("empty", 0, 4)], 2)
    assert plan == [[Slice("big", 0, 6)], [Slice("big", 6, 10), Slice("scalar", 0, 1), Slice("empty", 0, 0)]]


def test_more_ranks_than_elements_leaves_some_with_nothing() -> None:
    plan = plan_slices([("t", 2, 4)], 5)
    assert sum(len(rank) for rank in plan) == 2


@pytest.mark.parametrize(
    ("sizes", "world_size"), [([("a", 1, 4), ("a", 1, 4)], 1), ([("a", -1, 4)], 1), ([("a", 1, 0)], 1), ([], 0)]
)
def test_plan_slices_refuses_invalid_arguments(sizes: list[tuple[str, int, int]], world_size: int) -> None:
    with pytest.raises(ValueError):
        plan_slices(sizes, world_size)
