"""The fast lane is no other machine: a schedule leads to the same history there and over the real service, on both databases.

Longer: ``make simulate N=1000``. One again: ``python -m tests.support.sim_both --n 1 --seed S [--postgres]``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ratchet_service import ending
from ratchet_service.database import Database, sqlite_url
from ratchet_service.migrate import upgrade
from tests.support.sim.processes import SimDatabase
from tests.support.sim.stages import stage_directory
from tests.support.sim_both.__main__ import difference, driven
from tests.support.sim_both.histories import Modelled
from tests.support.sim_both.served import Calls
from tests.support.sim_pure import reconciler
from tests.support.sim_pure.world import MOVES, World

SCHEDULES = int(os.environ.get("RATCHET_TEST_SCHEDULES_BOTH", "5"))


@pytest.fixture
def stage(migrated: Database) -> Iterator[tuple[SimDatabase, Path]]:
    database = SimDatabase(migrated.url.render_as_string(hide_password=False))
    with stage_directory() as folder:
        yield database, folder
    database.dispose()


def test_a_schedule_has_the_same_history_in_memory_and_over_the_service(stage: tuple[SimDatabase, Path]) -> None:
    for seed in range(SCHEDULES):
        found = difference(seed, *stage)
        assert found is None, f"seed {seed}:\n{found}"


def test_schedules_are_told_in_full() -> None:
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
    original = ending.job_values

    def values(*args: Any) -> Any:
        found = original(*args)
        return found | {"failures": found["failures"] + 1}

    return patch.object(ending, "job_values", values)


def _asked_again() -> Any:
    """The service asks the engine once more: no row tells of it."""
    original = Calls.kill

    def kill(self: Any, ref: Any) -> list[str]:
        return original(self, ref) or original(self, ref)

    return patch.object(Calls, "kill", kill)


@pytest.mark.parametrize("planted", [_nothing_adopted, _counted_otherwise, _asked_again])
def test_a_difference_is_found(tmp_path: Path, planted: Callable[[], Any]) -> None:
    first = _first_that_shows(planted)
    database = SimDatabase(sqlite_url(tmp_path / "ratchet.db"))
    upgrade(database)
    with stage_directory() as folder, planted():
        found = next((text for seed in range(first, first + 6) if (text := difference(seed, database, folder))), None)
    database.dispose()
    assert found is not None and "--- the fast lane" in found and "\n+" in found


def test_a_schedule_that_neither_lane_plays_to_its_end_is_told(tmp_path: Path) -> None:
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
