"""What the reconciler reads from an attempt's files, which the job's code may have changed."""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ratchet_contract.paths import AttemptPaths
from ratchet_service.checkpoints.run_directory_scan import launched_at
from ratchet_service.reconciler.attempt_watch import agent_started_at

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("seconds", [1 << 40, -(1 << 40)], ids=["far future", "far past"])
def test_time_of_a_file_that_is_no_date_counts_as_now(seconds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a tmpfs stores any time
        paths = AttemptPaths(Path(folder))
        paths.launch_file.write_text("{}")
        os.utime(paths.launch_file, (seconds, seconds))
        assert abs(paths.launch_file.stat().st_mtime) > 1e11, "this file system does not store such a time"
        assert agent_started_at(paths.launch_file, NOW) == NOW == launched_at(paths, NOW)
