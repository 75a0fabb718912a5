"""What ``ratchet run`` tells of unfinished commands in the run directories next to its own."""

from __future__ import annotations

from pathlib import Path

from ratchet_client.cli.run.private_service import COMMAND_FILE, unfinished_elsewhere
from ratchet_contract.paths import HomePaths


def test_only_other_commands_of_the_same_job_name_are_unfinished_elsewhere(tmp_path: Path) -> None:
    for name in ("train-0a1b2c3d", "train-11111111", "train-22222222", "train-two-33333333", "train-ffffffff-44444444"):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMMAND_FILE).write_text(name)
    (tmp_path / "train-55555555").mkdir()  # its job has ended
    own = HomePaths(tmp_path / "train-0a1b2c3d")
    assert unfinished_elsewhere(own, "train") == ["train-11111111", "train-22222222"]
