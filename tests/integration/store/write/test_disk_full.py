"""A disk that is really full: the save fails with advice, leaves nothing behind, and older checkpoints stay good."""

from __future__ import annotations

import resource
import textwrap
from pathlib import Path

import pytest

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_store.filesystem.durable_io import NOT_WRITTEN
from ratchet_store.read.find_base import find_base
from tests.support.checkpoints import list_names, make_chain, make_checkpoint
from tests.support.small_disk import script_on_small_disk

SCRIPT = """
import sys
from pathlib import Path
from ratchet_contract.errors import CheckpointError
from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_store.read.find_base import find_base
from tests.support.checkpoints import list_names, make_checkpoint

root = Path(sys.argv[1])
good = make_checkpoint(root, 10)
try:
    make_checkpoint(root, 20, parent=good.base, scale=3000)
except CheckpointError as error:
    print(error.code, error.detail)
assert not [n for d in root.iterdir() for n in list_names(d) if n.endswith(".tmp")]
assert find_base(root, root / "quarantine", [Segment(attempt=1, after_step=0)]) == (good, [])
make_checkpoint(root, 30, parent=good.base)
print("saved again")
"""


def test_save_on_a_full_file_system_fails_with_advice(tmp_path: Path) -> None:
    said = script_on_small_disk(tmp_path, "1m", textwrap.dedent(SCRIPT), timeout=60)
    assert said.startswith(NOT_WRITTEN) and "No space left on device; the disk is full: free space" in said
    assert said.endswith("saved again\n")


def test_save_above_the_file_size_limit_fails_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    good = make_chain(tmp_path, 10)[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="the process limit") as caught:
            make_checkpoint(tmp_path, 20, parent=good.base, scale=3000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.code == NOT_WRITTEN
    assert [name for folder in tmp_path.iterdir() for name in list_names(folder) if name.endswith(".tmp")] == []
    assert find_base(tmp_path, tmp_path / "quarantine", [Segment(attempt=1, after_step=0)]) == (good, [])
