"""Buffers in an evaluation: rank 0's values on every rank, as DDP broadcasts them, and afterwards each rank's own."""

from __future__ import annotations

from tests.support import evaluation_buffer_cases as cases
from tests.support.gloo_ranks import Ranks


def test_evaluation_broadcasts_buffers_that_are_views_of_other_memory(two_ranks: Ranks) -> None:
    assert two_ranks.run(cases.buffers_by_form) == [{name: [True] * 3 for name in cases.FORMS}] * 2


def test_evaluation_leaves_out_buffers_that_ddp_ignores(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(cases.ignored_buffers)
    assert first == [[0.0], [1.0], [0.0], [1.0]]
    assert second == [[1.0] * 3, [1.0], [1.0] * 3, [2.0]]
