"""The journal of TensorBoard's event files, and what it cuts."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_worker.session import event_files
from ratchet_worker.session.event_files import EventFiles


class Attempts:
    """Attempts of one job that append bytes to their files in ``root``."""

    def __init__(self, root: Path) -> None:
        self.root, self.number, self.unknown = root, 0, 0

    def open(self) -> EventFiles:
        self.number += 1
        files = EventFiles(self.root, "job-1", self.number)
        self.unknown = files.open()
        return files

    def begin(self, step: int = 0, attempt: int | None = None) -> EventFiles:
        files = self.open()
        files.rewind(Base(step=step, attempt=attempt))
        return files

    def write(self, files: EventFiles, text: str, folder: str = ".") -> None:
        path = self.root / folder / f"events.out.tfevents.1.host.{folder}{files.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def text(self) -> str:
        return " ".join(
            path.read_text() for path in sorted(self.root.rglob("events*job-1-a*"), key=lambda p: p.name[-1])
        )


def test_files_are_cut_to_the_checkpoint_that_an_attempt_begins_with(tmp_path: Path) -> None:
    job = Attempts(tmp_path)
    first = job.begin()
    job.write(first, "a")
    first.record(5)
    job.write(first, "b")
    first.record(10)
    job.write(first, "lost")
    job.write(first, "lost", "added")  # by add_scalars, for the first time
    second = job.begin(10, 1)
    assert job.text() == "ab" and not [*(tmp_path / "added").iterdir()]
    job.write(second, "c")
    second.record(15)
    job.write(second, "lost")
    third = job.begin(15, 2)  # has no save of its own
    job.write(third, "lost")
    fourth = job.begin(15, 2)
    job.write(fourth, "d")
    fourth.record(20)
    assert job.text() == "ab c d"
    job.begin(5, 1)  # from an earlier checkpoint
    assert job.text() == "a"
    job.begin()  # the checkpoints were deleted
    assert job.text() == ""


def test_attempt_that_ends_before_it_trains_cuts_nothing(tmp_path: Path) -> None:
    """Such as one from an older checkpoint that is refused: the next one may start from the newest."""
    job = Attempts(tmp_path)
    first = job.begin()
    job.write(first, "a")
    first.record(5)
    second = job.open()
    job.write(second, "lost")  # before the first step
    third = job.open()
    job.write(third, "b")
    third.rewind(Base(step=5, attempt=1))
    assert job.text() == "a b"


def test_journal_with_a_line_that_was_cut_off_is_read_and_continued(tmp_path: Path) -> None:
    job = Attempts(tmp_path)
    first = job.begin()
    job.write(first, "a")
    first.record(5)
    with (tmp_path / ".job-1.jsonl").open("a") as journal:
        journal.write('{"attempt": 1, "step": 10, "si')
    job.write(first, "lost")
    second = job.begin(5, 1)
    job.write(second, "b")
    second.record(10)
    job.begin(10, 2)
    assert job.text() == "a b"


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("events.out.tfevents.1.host.2", "events.out.tfevents.1.host.job-2-a1", "notes.txt"):
        (tmp_path / name).write_text("kept")
    job = Attempts(tmp_path)
    job.begin()
    job.begin()
    assert [path.read_text() for path in sorted(tmp_path.iterdir()) if not path.name.startswith(".")] == ["kept"] * 3


def test_copies_of_event_files_and_files_that_no_journal_knows_are_left_alone(tmp_path: Path) -> None:
    job = Attempts(tmp_path)
    first = job.begin()
    job.write(first, "a")
    first.record(5)
    shutil.copytree(tmp_path, tmp_path.parent / "copy")
    (tmp_path.parent / "copy").rename(tmp_path / "copy")  # by the user, with the journal
    (tmp_path / "more").mkdir()
    (event_file,) = tmp_path.glob("events*")
    shutil.copy(event_file, tmp_path / "more")
    job.write(first, "lost")
    second = job.begin(5, 1)
    job.write(second, "b")
    second.record(10)
    job.begin(10, 2)
    assert job.text() == "a a a b"


def test_event_files_whose_journal_is_missing_are_kept_and_named(tmp_path: Path) -> None:
    job = Attempts(tmp_path)
    first = job.begin()
    job.write(first, "a")
    first.record(5)
    job.write(first, "?")  # nobody knows what belongs to step 5
    (tmp_path / ".job-1.jsonl").unlink()
    second = job.begin(5, 1)
    assert job.unknown == 1
    job.write(second, "b")
    second.record(10)
    job.write(second, "lost")
    job.begin(10, 2)
    assert job.unknown == 1 and job.text() == "a? b"
    job.begin(5, 1)
    assert job.unknown == 1 and job.text() == "a?"


def test_directory_in_another_one_is_cut_by_its_own_journal(tmp_path: Path) -> None:
    outer, inner = Attempts(tmp_path), Attempts(tmp_path / "val")
    first = inner.begin()
    inner.write(first, "a")
    first.record(5)
    late = outer.begin()  # opened after the save, as in an evaluation
    outer.write(late, "lost")
    outer.begin(5, 1)
    inner.begin(5, 1)
    assert inner.text() == "a" and not [*tmp_path.glob("events*")]


def test_events_that_do_not_reach_the_disk_are_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Attempts(tmp_path)
    first = job.begin()
    job.write(first, "a")

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(event_files, "fsync_path", fail)
    with pytest.raises(OSError, match="Input/output error"):
        first.record(5)
