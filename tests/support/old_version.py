"""The version before, from the repository's own history: its packages below a directory, to be run by processes of their own."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

BEFORE = "a2731dbe21ba97ac7f28799928c8a6fc03424d8e"
"""The last commit of the version before: database revision 0005, no owners, no tokens."""
REVISION = "0005"
FIRST_QUEUE = "3a56589e322ea458bc5f01aa249354f72bb01fc3"
"""A commit between both whose queue has one page, and tells neither how many wait nor where one job stands."""
ROOT = Path(__file__).parents[2]
PACKAGES = ("client", "contract", "hooks", "migrations", "service", "store", "worker")


def unpack(folder: Path, commit: str = BEFORE) -> Path:
    """Its packages and its tests' support below ``folder``. Skips the test where the history does not go back so far."""
    known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode:
        pytest.skip(f"the history here does not have {commit}: fetch all of it (git fetch --unshallow)")
    done = subprocess.run(
        ["git", "archive", commit, *PACKAGES, "tests/support"], cwd=ROOT, capture_output=True, check=True, timeout=60
    )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environ(root: Path) -> dict[str, str]:
    """Variables of a process that runs the packages below ``root``, a checkout, in the place of what is installed."""
    path = os.pathsep.join([str(root), *(str(root / name) for name in PACKAGES)])
    return {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_")} | {"PYTHONPATH": path}
