"""A reduced set of the exactness matrix: one job under every kind of kill, one per further family of hooks under one, since the
groups without a service walk through hooks and instants. ``make exactness`` runs all of it with any number of seeds."""

from __future__ import annotations

import pytest

from tests.e2e.exactness import KILLS, Kill, line, run_case
from tests.support.exact_cells import Cell
from tests.support.server import Server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "kinds"),
    [
        (Cell("powerSGD", "many", 2, "digits"), KILLS),  # every kind of kill, before compression starts and after
        (Cell("powerSGD+bf16", "one", 2, "bytelm"), ("rank",)),
    ],
    ids=str,
)
def test_interrupted_job_ends_with_the_same_bits(server: Server, cell: Cell, kinds: tuple[Kill, ...]) -> None:
    outcome, _ = run_case(server, cell, seed=11, reference=None, kinds=kinds)
    print(line(cell, outcome))
    assert not outcome.problems
