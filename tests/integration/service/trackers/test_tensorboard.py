"""TensorBoard reads each point once, whatever was killed while the file was written."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ratchet_service.trackers.sink import Batch, End, Note, Point, Run, TrackerError
from ratchet_service.trackers.tensorboard import TensorBoardSink
from tests.support.tracker_readers import read_tensorboard

START = datetime(2030, 1, 1, tzinfo=UTC)
RUN = Run("job-1", 1, "digits", "ann", "ratchet", {"team": "a"}, {"hook.name": "powerSGD"}, START)


def batch(*steps: int, end: End | None = None) -> Batch:
    points = [Point("loss", step, 1 / step, START + timedelta(seconds=step)) for step in steps]
    return Batch(points, [Note(7, steps[-1], START, "attempt 1 ended: rank-killed")], end)


def event_file(tmp_path: Path) -> Path:
    [file] = (tmp_path / "ratchet" / "job-1").iterdir()
    return file


def test_run_is_read_back_with_values_times_texts_and_the_end(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    state = sink.export(RUN, {}, batch(1, 2))
    sink.export(RUN, state, batch(3, end=End("SUCCEEDED", START, {"goodput": 0.9}, "/there")))
    points, texts = read_tensorboard(tmp_path / "ratchet" / "job-1")
    assert [step for step, _ in points["loss"]] == [1, 2, 3]
    assert [value for _, value in points["loss"]] == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-7)
    assert "| hook.name | powerSGD |" in texts["ratchet/parameters"]
    assert texts["ratchet/notes/7"] == "attempt 1 ended: rank-killed"
    assert "| checkpoint | /there |" in texts["ratchet/end"]
    assert state["path"] == str(tmp_path / "ratchet" / "job-1")


def test_nan_and_infinities_are_read_back(tmp_path: Path) -> None:
    values = (math.nan, math.inf, -math.inf)
    points = [Point(f"s{number}", 1, value, START) for number, value in enumerate(values)]
    TensorBoardSink(tmp_path).export(RUN, {}, Batch(points, [], None))
    found, _ = read_tensorboard(tmp_path / "ratchet" / "job-1")
    assert math.isnan(found["s0"][0][1])
    assert [found["s1"][0][1], found["s2"][0][1]] == [math.inf, -math.inf]


def test_kill_at_any_byte_of_a_batch_leaves_nothing_twice_and_nothing_out(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    state = sink.export(RUN, {}, batch(1, 2))
    file = event_file(tmp_path)
    before = file.read_bytes()
    sink.export(RUN, state, batch(3, 4))
    after = file.read_bytes()
    for cut in range(len(before), len(after) + 1, 7):
        file.write_bytes(after[:cut])
        assert TensorBoardSink(tmp_path).export(RUN, state, batch(3, 4))["length"] == len(after)
        assert file.read_bytes() == after
    file.write_bytes(after[:30])  # the first batch too, if it was never recorded
    sink.export(RUN, {}, batch(1, 2))
    assert file.read_bytes() == before


def test_file_that_was_shortened_or_deleted_is_an_error_that_says_so(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    state = sink.export(RUN, {}, batch(1, 2))
    file = event_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TrackerError, match="put the file back"):
        sink.export(RUN, state, batch(3))
    file.unlink()
    with pytest.raises(TrackerError, match="cannot be written"):
        sink.export(RUN, state, batch(3))


def test_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrackerError, match="cannot be written"):
        TensorBoardSink(tmp_path / "file").export(RUN, {}, batch(1))


def test_branch_has_a_directory_of_its_own_and_names_its_parent(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"number": 2, "parent": "job-1"}
    TensorBoardSink(tmp_path).export(replace(RUN, **changes), {}, batch(1))
    _, texts = read_tensorboard(tmp_path / "ratchet" / "job-1-2")
    assert "| parent | job-1 |" in texts["ratchet/parameters"]
