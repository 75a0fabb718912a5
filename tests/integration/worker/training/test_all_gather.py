"""Gathering tensors in a step: the gradients of one process with the whole batch, on every rank its own."""

from __future__ import annotations

from tests.support import all_gather_cases as cases
from tests.support.gloo_ranks import Ranks


def test_all_gather_gradients_equal_those_of_one_process(three_ranks: Ranks) -> None:
    for found in three_ranks.run(cases.check_gradients):
        assert all(found.values()), found


def test_contrastive_loss_over_ranks_trains_like_one_process(three_ranks: Ranks) -> None:
    assert max(three_ranks.run(cases.contrastive_gradient_difference)) < 1e-15


def test_all_gather_keeps_every_kind_of_tensor(three_ranks: Ranks) -> None:
    assert three_ranks.run(cases.changed_tensor_kinds) == [[]] * 3


def test_all_gather_works_in_a_subgroup(three_ranks: Ranks) -> None:
    assert three_ranks.run(cases.gather_in_subgroup) == [([0.0, 1.0], 3.0), ([0.0, 1.0], 3.0), ([2.0], 3.0)]


def test_all_gather_of_mismatched_tensors_is_refused_on_every_rank(three_ranks: Ranks) -> None:
    first, *others = three_ranks.run(cases.mismatch_errors)
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
