"""What ``ratchet run`` tells of unfinished commands in the run directories next to its own, and whose processes it kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet_client.cli.run.private_service import COMMAND_FILE, unfinished_elsewhere
from ratchet_client.cli.shared.service_process import kill_attempts, without_ratchet_variables
from ratchet_contract import env_vars
from ratchet_contract.paths import HomePaths


def test_only_other_commands_of_the_same_job_name_are_unfinished_elsewhere(tmp_path: Path) -> None:
    for name in ("train-0a1b2c3d", "train-11111111", "train-22222222", "train-two-33333333", "train-ffffffff-44444444"):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMMAND_FILE).write_text(name)
    (tmp_path / "train-55555555").mkdir()  # its job has ended
    own = HomePaths(tmp_path / "train-0a1b2c3d")
    assert unfinished_elsewhere(own, "train") == ["train-11111111", "train-22222222"]


def test_service_of_a_command_gets_the_bounds_of_parked_agents_and_no_other_setting() -> None:
    environ = {
        "RATCHET_STANDBY": "off",
        "RATCHET_HOME": "/elsewhere",
        "RATCHET_DATABASE_URL": "postgresql://x",
        "PATH": "/bin",
    }
    assert without_ratchet_variables(environ) == {"RATCHET_STANDBY": "off", "PATH": "/bin"}


@pytest.mark.processes
def test_attempts_below_a_run_directory_that_is_a_symbolic_link_are_killed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("home")
    environ = os.environ | {env_vars.ATTEMPT_DIR: f"{(tmp_path / 'home').resolve()}/jobs/1/attempts/1"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environ, stdin=subprocess.PIPE) as rank:
        kill_attempts(tmp_path / "link")
        killed = rank.poll()
    assert killed == -signal.SIGKILL
