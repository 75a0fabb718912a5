"""``make demo`` from its first to its last line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs import ROOT
from tests.support.full_matrix import full
from tests.support.reports import recorded_text
from tests.support.server import processes_below

pytestmark = pytest.mark.slow


@full
def test_demo_ends_with_identical_tensors_and_leaves_two_files_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=280)
    assert done.returncode == 0 and "tensors compared, 0 differ" in done.stdout, done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.svg", "report.html"]
    assert processes_below(tmp_path) == []
    attempts = json.loads(recorded_text(tmp_path / "report.html"))["attempts"]
    assert [one["cause"] for one in attempts] == ["completed", "api-preempt", "rank-killed"]
    assert re.search(r"live: http://127\.0\.0\.1:\d+/#/jobs/job-\w+\n", done.stdout), done.stdout
