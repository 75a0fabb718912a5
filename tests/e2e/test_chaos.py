"""A few faults of ``make chaos``, which injects any number."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet_service.database import Database
from tests.e2e.chaos import Chaos
from tests.support.plane import Plane


@pytest.mark.slow
def test_no_job_is_lost_and_none_runs_twice(tmp_path: Path, database: Database) -> None:
    plane = Plane(tmp_path / "home", database)
    try:
        chaos = Chaos(plane, faults=6, seed=3)
        assert chaos.run() == []
    finally:
        plane.close()
    assert chaos.done.total() == 6
    assert len(chaos.jobs) >= 3
