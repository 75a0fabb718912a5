"""The trial and the verdict on real FUSE file systems, and a checkpoint's life on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fuse import missing_package

KINDS = {
    "bindfs": ("fuse", "fuse is unknown to Ratchet"),
    "sshfs": ("fuse.sshfs", "need a server with OpenSSH's extensions"),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_checkpoints_can_be_saved_and_deleted_on_fuse_file_systems(tmp_path: Path, kind: str) -> None:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse")
    if (package := missing_package(kind)) is not None:
        pytest.skip(f"{package} not found: apt-get install --no-install-recommends {package}")
    command = ["unshare", "--mount", sys.executable, "-m", "tests.support.fuse", kind, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    found, (type_, says) = json.loads(done.stdout), KINDS[kind]
    assert (found["status"], found["type"]) == ("noted", type_) and says in found["says"]
    kept = {f"step-{step:012d}.a0001": True for step in (20, 40)}
    assert (found["deleted"], found["left"]) == ([10], kept)
    assert found["aside"] == [f"step-{30:012d}.a0001"]
