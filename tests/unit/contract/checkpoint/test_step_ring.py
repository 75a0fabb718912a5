"""The ring of step fingerprints on the disk: what a killed process leaves, what of it is read, and how large it gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet_contract.checkpoint.step_ring import (
    RING_RECORDS,
    RingHeader,
    StepFingerprint,
    StepRing,
    read_header,
    read_ring,
)

HEADER = RingHeader("start", {"world_size": 2, "torch": "2.13.0", "flush_denormal": None})
WRITES_AND_DIES = """
import os, signal, sys
from pathlib import Path
from ratchet_contract.checkpoint.step_ring import RingHeader, StepFingerprint, StepRing
ring = StepRing(Path(sys.argv[1]), RingHeader("start", {}))
for step in range(1, 38):
    ring.write(StepFingerprint(step, step * 7, step * 11, 2**64 - step))
os.kill(os.getpid(), signal.SIGKILL)
"""


def fingerprint(step: int) -> StepFingerprint:
    return StepFingerprint(step, step * 7, step * 11, 2**64 - step)


def test_step_ring_keeps_records_of_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "rings" / "rank.bin"
    done = subprocess.run([sys.executable, "-c", WRITES_AND_DIES, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert read_ring(path) == {step: fingerprint(step) for step in range(1, 38)}


def test_step_ring_header_round_trips(tmp_path: Path) -> None:
    StepRing(tmp_path / "ring", HEADER).close()
    assert read_header(tmp_path / "ring") == HEADER
    assert read_ring(tmp_path / "ring") == {}


def test_a_ring_does_not_grow_and_keeps_the_newest_steps(tmp_path: Path) -> None:
    ring = StepRing(tmp_path / "ring", HEADER)
    size = (tmp_path / "ring").stat().st_size
    for step in range(1, RING_RECORDS + 101):
        ring.write(fingerprint(step))
    assert (tmp_path / "ring").stat().st_size == size < 200 * 1024
    found = read_ring(tmp_path / "ring")
    assert sorted(found) == [*range(101, RING_RECORDS + 101)]
    assert found[101] == fingerprint(101)


@pytest.mark.parametrize("byte", range(40))
def test_step_ring_skips_torn_record(tmp_path: Path, byte: int) -> None:
    """The kill came in the middle of a store: some bytes are of the older step of that place."""
    path = tmp_path / "ring"
    ring = StepRing(path, HEADER)
    old, new = fingerprint(3), fingerprint(3 + RING_RECORDS)
    ring.write(old)
    before = path.read_bytes()
    ring.write(new)
    ring.write(fingerprint(4))
    after = path.read_bytes()
    begin = len(before) - RING_RECORDS * 40 + 3 * 40
    torn = after[: begin + byte] + before[begin + byte : begin + 40] + after[begin + 40 :]
    path.write_bytes(torn)
    found = read_ring(path)
    assert found.pop(4) == fingerprint(4)
    assert [*found.values()] in ([], [old], [new])  # never a mixture


@pytest.mark.parametrize(
    "damage", ["magic", "version", "json", "short", "long", "empty", "missing", "fifo", "directory"]
)
def test_step_ring_damaged_or_other_version_reads_as_empty(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ring"
    StepRing(path, HEADER).write(fingerprint(1))
    data = bytearray(path.read_bytes())
    place = {"magic": 0, "version": 8, "json": 30}.get(damage)
    if place is not None:
        data[place] ^= 1
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage == "directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"short": data[:-1], "long": data + b"x", "empty": b""}.get(damage, data))
    assert read_ring(path) == {}
    assert damage in ("short", "long") or read_header(path) is None


def test_fingerprint_difference_names_earliest_differing_part() -> None:
    one = fingerprint(5)
    assert one.first_difference(fingerprint(5)) is None
    assert one.first_difference(one._replace(parameters=1)) == "parameters"
    assert one.first_difference(one._replace(parameters=1, generators=1)) == "generators"
    assert one.first_difference(one._replace(parameters=1, generators=1, data=1)) == "data"


def test_a_header_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 KiB"):
        StepRing(tmp_path / "ring", RingHeader("start", {"env": "x" * 20_000}))
