"""Checkpoint files of Lightning's over attempts: what steps that are lost wrote and deleted, and what is done again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("lightning")


class Training:
    """Writes a file in every step, and keeps the newest two, as ``save_top_k=2`` would with a loss that falls."""

    def __init__(self, folder: Path, base: int) -> None:
        from ratchet_worker.integrations.lightning_files import CheckpointFiles

        self.folder, self.step = folder / "files", base
        self.folder.mkdir(exist_ok=True)
        self.files = CheckpointFiles(folder / "journal.jsonl", lambda: self.step)
        self.files.rewind(base)
        self.kept = [f"{n}.ckpt" for n in range(1, base + 1)][-2:]

    def train(self, until: int, *, saved: int = 0) -> None:
        while self.step < until:
            self.step += 1
            path = self.folder / f"{self.step}.ckpt"
            assert not path.exists()  # else Lightning would write another name
            self.files.record_write(path)
            path.write_text(f"of step {self.step}")
            self.kept.append(path.name)
            if len(self.kept) > 2:
                assert self.files.hide(self.folder / self.kept.pop(0))
        self.files.finalize(saved)

    def seen(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir() if not p.name.startswith("."))

    def hidden(self) -> int:
        return sum(p.name.startswith(".") for p in self.folder.iterdir())


def test_lightning_files_are_restored_to_state_at_resume_step(tmp_path: Path) -> None:
    first = Training(tmp_path, 0)
    first.train(7, saved=4)
    assert first.seen() == ["6.ckpt", "7.ckpt"] and first.hidden() == 3  # 1 and 2 went in steps 3 and 4
    second = Training(tmp_path, 4)
    assert second.seen() == ["3.ckpt", "4.ckpt"]
    second.train(6, saved=5)
    third = Training(tmp_path, 5)  # a kill in step 7: 6 is lost again
    assert third.seen() == ["4.ckpt", "5.ckpt"]
    third.train(8, saved=8)
    assert third.seen() == ["7.ckpt", "8.ckpt"] and third.hidden() == 0
    assert (third.folder / "7.ckpt").read_text() == "of step 7"


def test_lightning_files_of_lost_steps_are_removed_without_checkpoint(tmp_path: Path) -> None:
    Training(tmp_path, 0).train(3)
    again = Training(tmp_path, 0)
    assert again.seen() == []
    again.train(3, saved=3)
    assert again.seen() == ["2.ckpt", "3.ckpt"] and again.hidden() == 0


def test_lightning_files_of_others_stay_when_resuming_from_older_base(tmp_path: Path) -> None:
    training = Training(tmp_path, 0)
    (training.folder / "mine.ckpt").write_text("theirs")
    training.train(6, saved=6)
    older = Training(tmp_path, 4)  # the newer ones are damaged: 3 and 4 are gone for good
    assert older.seen() == ["mine.ckpt"]
    assert not older.files.hide(older.folder / "3.ckpt")


def test_lightning_files_of_ended_training_stay_when_restarted(tmp_path: Path) -> None:
    first = Training(tmp_path, 0)
    first.files.versions([0])
    first.train(4, saved=4)
    first.files.record_end()
    assert Training(tmp_path, 4).files.versions([1]) == [0]  # what stands behind fit runs again
    again = Training(tmp_path, 0)  # its checkpoints were deleted
    assert again.seen() == ["3.ckpt", "4.ckpt"] and again.files.versions([1]) == [1]


def test_lightning_journal_stays_short_if_each_step_writes_and_deletes_a_file(tmp_path: Path) -> None:
    training = Training(tmp_path, 0)
    for step in range(1, 401):
        training.train(step, saved=step)
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) < 250  # of 798
    assert len(training.files._entries) < 10
    training.train(403, saved=400)
    again = Training(tmp_path, 401)
    assert again.seen() == ["400.ckpt", "401.ckpt"]
    assert Training(tmp_path, 399).seen() == []  # 398 and 399 are gone for good


def test_lightning_journal_torn_line_is_skipped(tmp_path: Path) -> None:
    training = Training(tmp_path, 0)
    training.train(2)
    with (tmp_path / "journal.jsonl").open("a") as journal:
        journal.write('{"kind": "wri')
    again = Training(tmp_path, 1)
    assert again.seen() == ["1.ckpt"]
    again.train(2, saved=2)
    assert Training(tmp_path, 2).seen() == ["1.ckpt", "2.ckpt"]


def test_csv_logger_rows_of_lost_steps_are_removed(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from ratchet_worker.integrations.lightning_files import csv_rows, open_versions, rewind_csv, set_versions

    def logger() -> Any:
        return CSVLogger(tmp_path, flush_logs_every_n_steps=2)

    first = logger()
    first.log_metrics({"loss": 1.0}, 0)
    assert csv_rows([first]) == [1]
    first.log_metrics({"loss": 0.5}, 1)
    first.log_metrics({"accuracy": 0.9, "loss": 0.4}, 2)
    first.save()
    second = logger()
    assert open_versions([second]) == [1]
    second = logger()
    set_versions([second], [0])
    assert rewind_csv([second], [1], own=True) == []
    second.log_metrics({"loss": 0.5}, 1)
    second.save()
    assert (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines() == [
        "accuracy,loss,step",
        ",1.0,0",
        ",0.5,1",
    ]
    assert [p.name for p in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ("", ["step", '""', '""']),
        ("loss,st", ["step", '""', '""']),
        ("loss,step\r\n0.5,1\r\n0.2", ["loss,step", "0.5,1", ","]),
    ],
)
def test_csv_rows_that_were_cut_off_are_named_and_left_empty(tmp_path: Path, left: str, kept: list[str]) -> None:
    """The file as a kill leaves it while Lightning rewrites its header; an attempt that was killed then had 2 rows saved."""
    from lightning.pytorch.loggers import CSVLogger

    from ratchet_worker.integrations.lightning_files import csv_rows, rewind_csv

    file = tmp_path / "lightning_logs/version_0/metrics.csv"
    file.parent.mkdir(parents=True)
    file.with_name(".metrics.csv.before").write_bytes(left.encode())  # an earlier attempt has failed at this
    logger = CSVLogger(tmp_path, version=0)
    (message,) = rewind_csv([logger], [2], own=True)
    assert str(file) in message and f"{kept[1:].count(kept[-1])} of 2 rows are lost" in message
    assert file.read_text().splitlines() == kept and [*file.parent.iterdir()] == [file]
    logger.log_metrics({"accuracy": 0.9}, 2)
    assert csv_rows([logger]) == [3]
    again = CSVLogger(tmp_path, version=0)
    assert rewind_csv([again], [2], own=True) == []  # a second kill, before another checkpoint: cut at the same place
    assert csv_rows([again]) == [2]


@pytest.mark.parametrize("version", [0, "mine"])
def test_deleted_csv_file_is_named_and_its_rows_are_left_empty(tmp_path: Path, version: int | str) -> None:
    """Of a directory that Lightning has numbered even if the directory is gone: the job has no other one."""
    from lightning.pytorch.loggers import CSVLogger

    from ratchet_worker.integrations.lightning_files import csv_rows, rewind_csv

    logger = CSVLogger(tmp_path, version=version)
    file = Path(logger.log_dir, "metrics.csv")
    if version == "mine":
        file.parent.mkdir(parents=True)
    (message,) = rewind_csv([logger], [2], own=True)
    assert str(file) in message and "2 of 2 rows are lost" in message
    assert csv_rows([logger]) == [2] and [*file.parent.iterdir()] == [file]


@pytest.mark.parametrize("own", [True, False])
def test_logger_in_a_directory_without_the_csv_file_begins_one(tmp_path: Path, own: bool) -> None:
    """As for a fork, and for a script that names the directory after the time of the start."""
    from lightning.pytorch.loggers import CSVLogger

    from ratchet_worker.integrations.lightning_files import csv_rows, rewind_csv

    logger = CSVLogger(tmp_path, version="12-30")
    assert rewind_csv([logger], [2], own=own) == [] and not any(tmp_path.iterdir())
    logger.log_metrics({"loss": 0.5}, 1)
    assert csv_rows([logger]) == [1]
