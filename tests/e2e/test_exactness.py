"""One cell of the exactness matrix, killed before compression starts and preempted after; ``RATCHET_TEST_STRIKES=all``: under
every kind of kill; ``RATCHET_TEST_HOOKS=all``: one cell of each hook as well, in which a rank is killed once. The groups without
a service walk through hooks and instants in ``tests/integration``; ``make exactness`` runs all of it with any number of seeds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.exactness import KILLS, Kill, line, run_case, run_undisturbed
from tests.support.exact_cells import HOOKS, ON_ENGINES, Cell
from tests.support.server import Server

CHOSEN: tuple[Kill, ...] = KILLS if os.environ.get("RATCHET_TEST_STRIKES") == "all" else ("rank", "preempt")
ONCE: tuple[Kill, ...] = ("rank",)
CASES = [(ON_ENGINES, CHOSEN), *((hook, ONCE) for hook in HOOKS if os.environ.get("RATCHET_TEST_HOOKS") == "all")]


@pytest.fixture
def unforked_server(tmp_path: Path) -> Iterator[Server]:
    """One whose every process is started as a user's: nothing of it is forked from a process of the tests."""
    server = Server(tmp_path / "home", afresh=True)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "kinds"), CASES, ids=[hook for hook, _ in CASES])
def test_interrupted_job_resumes_exactly(
    unforked_server: Server, server: Server, hook: str, kinds: tuple[Kill, ...]
) -> None:
    """Compared with an undisturbed job whose processes are forked."""
    cell = Cell(hook, "many", 2, "digits")
    reference = run_undisturbed(server, cell.spec("reference"))
    outcome, _ = run_case(unforked_server, cell, seed=11, reference=reference, kinds=kinds)
    print(line(cell, outcome))
    assert not outcome.problems
