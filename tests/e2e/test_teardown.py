"""Ranks that join a group, train and leave it end cleanly, every time; ``python -m tests.e2e.teardown`` makes it a thousand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PROGRAM = """
import os
from tests.e2e import teardown

bad = teardown.main(["--n", "10", "--groups", "5"])
print("ten:", bad, flush=True)
teardown.join_step_leave = lambda rank, *_: os.abort() if rank else None  # what it is there to see
print("control:", teardown.main(["--n", "1"]), flush=True)
"""


def test_ten_process_groups_end_without_abort() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert "10 groups of 2 ranks: 0 ranks ended badly\nten: 0" in done.stdout, done.stdout
    assert "rank 1: SIGABRT" in done.stdout and done.stdout.endswith("control: 1\n")
