"""The fast lane is no other machine: a schedule leads to the same history there and over the real service, on both databases.

Longer: ``make simulate N=1000``. One again: ``python -m tests.support.sim_equivalence --n 1 --seed S [--postgres]``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from ratchet_service.reconciler import finish_attempt
from tests.support.sim.processes import SimDatabase
from tests.support.sim.stage_pool import stage_directory
from tests.support.sim_equivalence.__main__ import difference, driven
from tests.support.sim_equivalence.histories import Modelled
from tests.support.sim_equivalence.service_world import Calls
from tests.support.sim_in_memory import reconciler
from tests.support.sim_in_memory.world import MOVES, World

SCHEDULES = int(os.environ.get("RATCHET_TEST_SCHEDULES_BOTH", "5"))


@pytest.fixture
def stage(migrated_database: Database) -> Iterator[tuple[SimDatabase, Path]]:
    database = SimDatabase(migrated_database.url.render_as_string(hide_password=False))
    with stage_directory() as folder:
        yield database, folder
    database.dispose()


def test_schedule_has_same_history_in_memory_and_over_service(stage: tuple[SimDatabase, Path]) -> None:
    for seed in range(SCHEDULES):
        found = difference(seed, *stage)
        assert found is None, f"seed {seed}:\n{found}"


def test_compared_history_has_transitions_times_commits_and_rows() -> None:
    """What is compared has transitions, times, commits and rows; another seed tells something else."""
    told = driven(Modelled(4), 40)
    assert told == driven(Modelled(4), 40) != driven(Modelled(5), 40)
    text = "\n".join(told)
    for part in (
        " launch from=QUEUED to=STARTING",
        " training from=STARTING",
        "attempt-ended cause=",
        "attempt cpus=",
        "commits 2.1",
    ):
        assert part in text


def _nothing_adopted() -> Any:
    """In the model: a checkpoint whose report was lost stays unknown."""
    return patch.object(reconciler, "adoptable", lambda *_: [])


def _counted_otherwise() -> Any:
    """Over the service, where the model asks ``verdict`` itself."""
    original = finish_attempt.job_values

    def values(*args: Any) -> Any:
        found = original(*args)
        return found | {"failures": found["failures"] + 1}

    return patch.object(finish_attempt, "job_values", values)


def _asked_again() -> Any:
    """The service asks the engine once more: no row tells of it."""
    original = Calls.kill

    def kill(self: Any, ref: Any) -> list[str]:
        return original(self, ref) or original(self, ref)

    return patch.object(Calls, "kill", kill)


@pytest.mark.parametrize("planted", [_nothing_adopted, _counted_otherwise, _asked_again])
def test_planted_difference_between_lanes_is_detected(tmp_path: Path, planted: Callable[[], Any]) -> None:
    first = _first_that_shows(planted)
    database = SimDatabase(sqlite_url(tmp_path / "ratchet.db"))
    upgrade(database)
    with stage_directory() as folder, planted():
        found = next((text for seed in range(first, first + 6) if (text := difference(seed, database, folder))), None)
    database.dispose()
    assert found is not None and "--- the fast lane" in found and "\n+" in found


def test_schedule_failing_in_both_lanes_is_reported(tmp_path: Path) -> None:
    database = SimDatabase(sqlite_url(tmp_path / "ratchet.db"))
    upgrade(database)
    with stage_directory() as folder, patch.object(World, "run", side_effect=LookupError("planted")):
        found = difference(0, database, folder)
    database.dispose()
    assert found is not None and "planted" in found


def _first_that_shows(planted: Callable[[], Any]) -> int:
    """The first schedule that what is planted in the model changes; 0 where it is planted in the service."""
    for seed in range(400):
        sound = driven(Modelled(seed), MOVES)
        with planted():
            if driven(Modelled(seed), MOVES) != sound:
                return seed
    return 0
