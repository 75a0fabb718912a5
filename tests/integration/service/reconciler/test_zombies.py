"""Real agents that are stopped past their end and go on: every late write is refused, or lies where nobody looks for it.

More of them: ``make zombies N=100``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.exit_codes import EXIT_LEASE_LOST
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.db.engine import Database
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.launch_file import build_launch_file
from tests.support.control_plane import ROOT, Plane, trainer_launcher, trainer_spec
from tests.support.fake_trainer import AGENT
from tests.support.zombies import OutOfReach, check_zombie, create_zombies

ZOMBIES = int(os.environ.get("RATCHET_TEST_ZOMBIES", "4"))
AT_ONCE = 4


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database, cpu_slots=64)
    made.serve_api()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("migrated_database", ["sqlite", *(["postgresql"] if ZOMBIES > 10 else [])], indirect=True)
@pytest.mark.parametrize("told_by", ["service", "disk"])
def test_late_writes_of_a_zombie_agent_are_refused_or_ignored(control_plane: Plane, told_by: str) -> None:
    engine = trainer_launcher(control_plane.paths, OutOfReach)
    assert isinstance(engine, OutOfReach)
    control_plane.start_reconciler(engine)
    late, number = 0, max(1, ZOMBIES // (4 if ZOMBIES > 10 else 2))
    for begin in range(0, number, AT_ONCE):
        zombies = create_zombies(control_plane, engine, min(AT_ONCE, number - begin), told_by=told_by)
        for zombie in zombies:
            check_zombie(zombie, told_by=told_by)
        late += sum(zombie.committed_late for zombie in zombies)
    print(f"\n{number} zombies, told by the {told_by}: {late} checkpoints committed late, none on a lineage")


def test_agent_starting_after_its_attempt_was_fenced_starts_nothing(tmp_path: Path) -> None:
    """Its launcher was held up until the attempt had been settled."""
    home = HomePaths(tmp_path)
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python")
    launch = build_launch_file(home, "job-000000000001", 1, parse_spec(trainer_spec()), resolved, (), "t", Desired.RUN)
    paths = home.job("job-000000000001").attempt(1)
    attempt_files.fence(paths)
    attempt_files.write_launch(paths, launch)
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([*AGENT, str(paths.launch_file)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_LEASE_LOST and "the attempt is over" in done.stderr + done.stdout
    assert sorted(path.name for path in paths.root.iterdir()) == ["FENCED", "agent.lock", "launch.json"]
