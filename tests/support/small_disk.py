"""A small disk to be filled: a tmpfs in a mount namespace of its own, which ends with the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def on_small_disk(
    disk: Path, size: str, command: str, *, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``command`` of a shell, where ``disk`` is one of ``size``, as ``mount`` has it (``1m``)."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces")
    mounted = f"mount -t tmpfs -o size={size} none {disk} && {command}"
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted], capture_output=True, text=True, timeout=timeout, env=env
    )


def script_on_small_disk(directory: Path, size: str, script: str, *arguments: str, timeout: float) -> str:
    """What ``script`` prints, called with ``arguments`` and the disk's path. It must end well."""
    disk, file = directory / "disk", directory / "script.py"
    disk.mkdir()
    file.write_text(script)
    command = " ".join(["exec", sys.executable, str(file), *arguments, str(disk)])
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = on_small_disk(disk, size, command, timeout=timeout, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
