"""The small files between a rank and its agent: spool, counter, control; torn, full and half-written."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ratchet_contract.phases import Desired
from ratchet_contract.protocol.counter_layout import finished_step, mid_step_save
from ratchet_contract.protocol.messages import Control, Metrics, Note, RankBatch
from ratchet_worker.ipc.control_file import ControlReader, write_control
from ratchet_worker.ipc.progress_counter import CounterReader, Reading, Stage, StepCounter
from ratchet_worker.ipc.report_spool import Spool, SpoolReader


def note(text: str) -> Note:
    return Note(rank=0, at="", type="test", message=text)


def texts(batch: RankBatch | None) -> list[str]:
    assert batch is not None
    return [m.message if isinstance(m, Note) else m.kind for m in batch.messages]


def test_spool_keeps_order_and_numbers_over_limits_and_acks(tmp_path: Path) -> None:
    path = tmp_path / "spool" / "rank.jsonl"
    reader = SpoolReader(path, 0)
    assert reader.batch() == (None, 0)
    spool = Spool(path)
    for i in range(10):
        spool.append(note(str(i)))
    batch, size = reader.batch(max_lines=4)
    assert texts(batch) == ["0", "1", "2", "3"] and reader.has_more(size)
    again, _ = reader.batch(max_lines=4)
    assert again == batch  # not acknowledged: the same once more
    reader.ack(3)  # the service stored a part
    batch, _ = reader.batch(max_bytes=1)  # a line that is too large is sent alone, not never
    assert batch is not None and (batch.from_seq, texts(batch)) == (4, ["3"])
    reader.ack(10)
    assert reader.batch() == (None, 0)
    reader.ack(2)  # the service came back from an older copy of its database
    batch, size = reader.batch()
    assert batch is not None and (batch.from_seq, texts(batch)[0]) == (3, "2") and not reader.has_more(size)
    spool.close()


def test_spool_torn_last_line_is_ignored_until_complete(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    line = note("ä" * 50).model_dump_json().encode() + b"\n"
    path.write_bytes(line + line[:60])
    reader = SpoolReader(path, 0)
    batch, _ = reader.batch()
    assert batch is not None and len(batch.messages) == 1
    reader.ack(1)
    assert reader.batch() == (None, 0)
    path.write_bytes(line + line)
    batch, _ = reader.batch()
    assert batch is not None and batch.from_seq == 2


def test_spool_invalid_line_keeps_sequence_number(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    path.write_bytes(b'{"kind": "nonsense"}\n' + note("after").model_dump_json().encode() + b"\n")
    batch, _ = SpoolReader(path, 0).batch()
    assert batch is not None and len(batch.messages) == 2
    assert isinstance(batch.messages[0], Note) and batch.messages[0].type == "bad-message"
    assert texts(batch)[1] == "after"


def test_spool_preserves_nan_and_infinity(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "rank.jsonl")
    spool.append(Metrics(rank=0, at="", step=1, values={"loss": float("nan"), "best": float("-inf")}))
    spool.close()
    batch, _ = SpoolReader(tmp_path / "rank.jsonl", 0).batch()
    assert batch is not None and isinstance(batch.messages[0], Metrics)
    assert str(batch.messages[0].values) == "{'loss': nan, 'best': -inf}"


def test_spool_appends_from_threads_do_not_interleave(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "rank.jsonl")
    threads = [
        threading.Thread(target=lambda k=k: [spool.append(note(f"{k}:{i}" * 100)) for i in range(100)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spool.close()
    batch, _ = SpoolReader(tmp_path / "rank.jsonl", 0).batch(max_bytes=10**9)
    assert batch is not None and len(batch.messages) == 400
    assert "bad-message" not in [m.type for m in batch.messages if isinstance(m, Note)]


_FULL_DISK = """
import resource, sys
from pathlib import Path
from ratchet_contract.messages import Note
from ratchet_worker.ipc.report_spool import Spool
path = Path(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
spool = Spool(path)
for i in range(100):
    if i == 20:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    if i == 60:
        assert not spool.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    spool.append(Note(rank=0, at="", type="test", message=str(i)))
spool.close()
"""


def test_spool_on_full_disk_neither_raises_nor_loses_messages(tmp_path: Path) -> None:
    """The kernel refuses to let the file grow (in the middle of a line) and later allows it again."""
    path = tmp_path / "rank.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("messages wait in memory") == 1
    batch, _ = SpoolReader(path, 0).batch()
    assert texts(batch) == [str(i) for i in range(100)]


def test_step_counter_reports_steps_and_stage(tmp_path: Path) -> None:
    path = tmp_path / "counters" / "rank.bin"
    reader = CounterReader(path)
    assert reader.read() is None
    counter = StepCounter.create(path)
    assert reader.read() == Reading(0, 0, 0, Stage.STARTUP)
    counter.enter_stage(Stage.TRAINING)
    counter.start_step(1201)
    counter.finish_step(1201)
    counter.tick()
    assert reader.read() == Reading(4, 1201, 1201, Stage.TRAINING)
    counter.set_saved_within(1201)
    assert (mid_step_save(path), finished_step(path)) == (1201, 1201)
    counter.set_saved_within(0)
    assert mid_step_save(path) == mid_step_save(tmp_path / "none") == 0
    assert path.stat().st_size == 64
    counter.close()
    path.write_bytes(bytes(64))  # made, but not ready
    assert reader.read() is None


def test_unreadable_counter_is_no_news_and_no_error(tmp_path: Path) -> None:
    path = tmp_path / "rank.bin"
    counter = StepCounter.create(path)
    counter.enter_stage(99)  # type: ignore[arg-type]
    assert CounterReader(path).read() is None
    counter.close()
    path.unlink()
    path.mkdir()  # a read error that even root gets
    assert CounterReader(path).read() is None


def test_control_reader_returns_each_change_once(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    reader = ControlReader(path)
    assert reader.poll() is None
    write_control(path, Control())
    assert reader.poll() == Control()
    assert reader.poll() is None
    for request in range(1, 20):  # faster than the file system's clock ticks
        wish = Control(desired=Desired.SUSPEND, checkpoint_request=request)
        write_control(path, wish)
        assert reader.poll() == wish
    path.write_text("{")
    assert reader.poll() is None
    write_control(path, Control(desired=Desired.CANCEL))
    assert reader.poll() == Control(desired=Desired.CANCEL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["control.json"]


def test_spool_in_unwritable_place_raises_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        Spool(tmp_path / "file" / "rank.jsonl")
