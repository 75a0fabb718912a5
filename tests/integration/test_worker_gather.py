"""Gathering tensors in a step: the gradients of one process with the whole batch, on every rank its own."""

from __future__ import annotations

from tests.support import gather_cases as cases
from tests.support.groups import Ranks


def test_gradients_are_those_of_the_plain_computation(three: Ranks) -> None:
    for found in three.run(cases.gradients):
        assert all(found.values()), found


def test_a_loss_over_all_ranks_trains_like_one_process_with_the_whole_batch(three: Ranks) -> None:
    assert max(three.run(cases.contrastive)) < 1e-15


def test_every_kind_of_tensor_comes_back_as_it_was(three: Ranks) -> None:
    assert three.run(cases.kinds) == [[]] * 3


def test_in_a_group_of_some_of_the_ranks(three: Ranks) -> None:
    assert three.run(cases.in_a_group) == [([0.0, 1.0], 3.0), ([0.0, 1.0], 3.0), ([2.0], 3.0)]


def test_ranks_that_differ_are_named_on_every_rank(three: Ranks) -> None:
    first, *others = three.run(cases.refused)
    assert others == [first, first]
    assert [text.split(". ")[0].split("; ")[0] for text in first] == [
        "all_gather: rank 0 gave a tensor of torch.float32 [2, 3] without a gradient, rank 1 one of torch.float32 [2, 4] "
        "without a gradient",
        "all_gather: rank 0 gave a tensor of torch.float32 [2] without a gradient, rank 2 one of torch.float16 [2] without a "
        "gradient",
        "all_gather: rank 0 gave a tensor of torch.float32 [2] with a gradient, rank 1 one of torch.float32 [2] without a "
        "gradient",
        "all_gather takes tensors of up to 13 dimensions, not 14",
        "all_gather takes dense tensors, not one of layout torch.sparse_coo",
    ]
