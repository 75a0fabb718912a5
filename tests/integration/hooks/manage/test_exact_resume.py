"""A run that is killed and resumed ends in the same bits as one that nobody touched, whatever hook, model and DDP options.

These rows hold every level of every factor once, and their ranks live on: an interruption replaces the objects. ``make
exactness`` runs those that hold every pair, and kills the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.exact_matrix import TOTAL, Row, describe, factors, reduced_matrix
from tests.support.exact_matrix_runner import Killable, check_killed_row, check_row
from tests.support.exact_runs import run_row
from tests.support.gloo_ranks import Ranks


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Ranks]]:
    """Groups of ranks by size, made when the first row asks for one."""
    made: dict[int, Ranks] = {}
    yield made
    for ranks in made.values():
        ranks.close(clean=ranks.alive)


def of_size(groups: dict[int, Ranks], world: int) -> Ranks:
    if world not in groups or not groups[world].alive:
        groups[world] = Ranks(world)
    return groups[world]


@pytest.mark.parametrize("row", sorted(reduced_matrix(), key=lambda row: row["world"]), ids=describe)
def test_resume_is_exact_for_every_level_of_every_factor(groups: dict[int, Ranks], row: Row) -> None:
    assert check_row(of_size(groups, int(row["world"])), row, seed=0).problems == []


@pytest.mark.parametrize("what", ["model/", "user:0/", "buffers/", "hook/residual", "hook/q/", "rng/"])
def test_one_flipped_bit_in_a_checkpoint_changes_the_result(groups: dict[int, Ranks], what: str) -> None:
    row = {factor: levels[0] for factor, levels in factors().items()} | {"hook": "powerSGD"}
    results = of_size(groups, 2).run(run_row, 2, row, TOTAL, [], [4], what)
    assert all(result.different for result in results)


def test_ranks_killed_by_sigkill_resume_exactly_in_other_processes() -> None:
    row = {factor: levels[0] for factor, levels in factors().items()} | {"hook": "powerSGD"}
    with Killable(2) as ranks:
        assert check_killed_row(ranks, row, 0).problems == []
        spoiled = check_killed_row(ranks, row, 0, spoil="model/").problems
    assert len(spoiled) == 2 and all(text.startswith(f"rank {i}: model/") for i, text in enumerate(spoiled)), spoiled
