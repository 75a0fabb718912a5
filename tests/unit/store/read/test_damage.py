"""Damage of every kind is found, every time. ``RATCHET_TEST_TRIALS`` sets the trials of each kind (default 50)."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED, UNREADABLE
from ratchet_store.read.checkpoint_reader import CheckpointReader, load, verify
from ratchet_store.read.find_base import find_base
from tests.support.checkpoints import copy_checkpoint, make_chain, make_checkpoint

pytestmark = pytest.mark.processes

TRIALS = int(os.environ.get("RATCHET_TEST_TRIALS", "50"))
PAGE = 4096


def _a_rank_file(directory: Path, source: random.Random) -> Path:
    return source.choice(sorted(directory.glob("rank-*")))


def _flip(path: Path, source: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
    path.write_bytes(raw)


def bit_flip(directory: Path, source: random.Random) -> None:
    _flip(_a_rank_file(directory, source), source)


def zero_page(directory: Path, source: random.Random) -> None:
    path = _a_rank_file(directory, source)
    raw = bytearray(path.read_bytes())
    begin = source.randrange(len(raw) // PAGE) * PAGE
    raw[begin : begin + PAGE] = bytes(PAGE)
    path.write_bytes(raw)


def zero_tail(directory: Path, source: random.Random) -> None:
    path = _a_rank_file(directory, source)
    raw = path.read_bytes()
    keep = source.randrange(len(raw) - 8)
    path.write_bytes(raw[:keep].ljust(len(raw), b"\0"))


def truncation(directory: Path, source: random.Random) -> None:
    path = _a_rank_file(directory, source)
    os.truncate(path, source.randrange(path.stat().st_size))


def growth(directory: Path, source: random.Random) -> None:
    path = _a_rank_file(directory, source)
    path.write_bytes(path.read_bytes() + source.randbytes(source.randint(1, 9)))


def missing_file(directory: Path, source: random.Random) -> None:
    _a_rank_file(directory, source).unlink()


def swapped_file(directory: Path, source: random.Random) -> None:
    path = _a_rank_file(directory, source)
    other = make_checkpoint(directory.parent / "other", source.randrange(100, 10**6))
    shutil.copy(directory.parent / "other" / other.id / path.name, path)
    shutil.rmtree(directory.parent / "other")


def swapped_ranks(directory: Path, source: random.Random) -> None:
    a, b = sorted(directory.glob("rank-*"))[:2]
    raw = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(raw)


def stale_manifest(directory: Path, source: random.Random) -> None:
    """Of another save with the same name: the files' names and sizes fit."""
    other = make_checkpoint(directory.parent / "other", 10, seed=source.randrange(100, 10**6))
    shutil.copy(directory.parent / "other" / other.id / MANIFEST_NAME, directory)
    shutil.rmtree(directory.parent / "other")


def manifest_of_another_step(directory: Path, source: random.Random) -> None:
    other = make_checkpoint(directory.parent / "other", 11)
    shutil.copy(directory.parent / "other" / other.id / MANIFEST_NAME, directory)
    shutil.rmtree(directory.parent / "other")


def torn_manifest(directory: Path, source: random.Random) -> None:
    path = directory / MANIFEST_NAME
    os.truncate(path, source.randrange(path.stat().st_size))


def zeroed_manifest(directory: Path, source: random.Random) -> None:
    path = directory / MANIFEST_NAME
    raw = path.read_bytes()
    path.write_bytes(raw[: source.randrange(len(raw) - 1)].ljust(len(raw), b"\0"))


def flipped_manifest(directory: Path, source: random.Random) -> None:
    _flip(directory / MANIFEST_NAME, source)


KINDS: list[Callable[[Path, random.Random], None]] = [
    bit_flip, zero_page, zero_tail, truncation, growth, missing_file, swapped_file, swapped_ranks, stale_manifest,
    manifest_of_another_step, torn_manifest, zeroed_manifest, flipped_manifest,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damaged_checkpoint_is_detected_and_older_one_used(
    tmp_path: Path, kind: Callable[[Path, random.Random], None]
) -> None:
    """The older one is taken, and the damaged one told and kept whole."""
    older, newer = make_chain(tmp_path / "good", 9, 10)
    root, quarantine, found = tmp_path / "checkpoints", tmp_path / "quarantine", 0
    copy_checkpoint(tmp_path / "good" / older.id, root / older.id)
    began = time.process_time()
    for trial in range(TRIALS):
        directory = copy_checkpoint(tmp_path / "good" / newer.id, root / newer.id)
        kind(directory, random.Random(f"{kind.__name__}/{trial}"))
        base, moved = find_base(root, quarantine, [Segment(attempt=1, after_step=0)])
        assert [(m.step, m.path.parent, bool(m.error)) for m in moved] == [(10, quarantine, True)], (trial, moved)
        found += base == older and not directory.exists()
        shutil.rmtree(quarantine)
    each = (time.process_time() - began) / TRIALS
    print(
        f"{kind.__name__}: {found} of {TRIALS} found, and the older checkpoint taken; {each * 1e3:.1f} ms of processor each"
    )
    assert (found, verify(tmp_path / "good" / newer.id).ok) == (TRIALS, True)


def test_checkpoint_in_wrongly_named_directory_fails_verification(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, 10)
    for step, attempt in [(11, 1), (10, 2)]:
        wrong = copy_checkpoint(tmp_path / manifest.id, tmp_path / checkpoint_dir_name(step, attempt))
        outcome = verify(wrong)
        assert not outcome.ok and "the directory is named" in str(outcome.error)


def test_damaged_format_version_is_reported_as_damage(tmp_path: Path) -> None:
    directory = tmp_path / make_checkpoint(tmp_path, 10).id
    path = directory / MANIFEST_NAME
    raw = path.read_bytes()
    assert raw.count(b'"format_version": 2,') == 1
    path.write_bytes(raw.replace(b'"format_version": 2,', b'"format_version": 9,'))
    assert "does not match its own digest" in str(verify(directory).error)


def test_damaged_rank_file_is_not_loaded_and_is_named(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, 10)
    path = tmp_path / manifest.id / manifest.files[1].name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002.safetensors: the bytes do not match") as caught:
        load(tmp_path / manifest.id, manifest, lambda e: e.name == "rank/1/rng/torch")
    assert caught.value.code == DAMAGED
    with pytest.raises(CheckpointError):
        CheckpointReader(tmp_path / manifest.id).state(1)
    assert CheckpointReader(tmp_path / manifest.id).state(0) == {"rank": 0, "seed": 10001}


def test_read_error_is_reported_as_unreadable_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / make_checkpoint(tmp_path, 10).id

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error") as caught:
        verify(directory)
    assert caught.value.code == UNREADABLE
