"""The index beside a log: what the agent records, what lines get of it, and that it is never trusted beyond the log itself."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.protocol.log_index import RECORD, LogTimes
from ratchet_service.job_files.rank_log import lines_of, since_offset, tail_offset
from ratchet_worker.agent.log_limits import LogKeeper
from tests.support.rank_logs import log_keeper

BEGIN = 1_900_000_000.0


def keeper(root: Path) -> LogKeeper:
    return log_keeper(AttemptPaths(root))


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(BEGIN + seconds, UTC)


def test_log_lines_have_time_of_poll_that_recorded_them(tmp_path: Path) -> None:
    kept, log = keeper(tmp_path), AttemptPaths(tmp_path).log(0)
    written = []
    for second in range(60):  # a line a second, a long line in between
        text = f"line {second}" + "x" * (70_000 if second == 31 else 0)
        written.append(text)
        with log.open("a") as handle:
            handle.write(text + "\n")
        kept.poll(BEGIN + second)
    kept.poll(BEGIN + 100, last=True)
    found = [line for line in lines_of(log, 1, 0, 0, None, partial=True) if not line.text.startswith("x")]
    assert len(found) == 60
    for second, line in enumerate(found):
        assert line.at is not None and moment(second) <= line.at <= moment(max(second + 5, 100 if second > 55 else 0))
    assert len(AttemptPaths(tmp_path).log_times(0).read_bytes()) // RECORD.size <= 16  # sparse: 5 s or 64 KiB apart


def test_since_offset_covers_all_later_lines_and_few_earlier(tmp_path: Path) -> None:
    kept, log = keeper(tmp_path), AttemptPaths(tmp_path).log(0)
    for second in range(100):
        with log.open("a") as handle:
            handle.write(f"{second}\n")
        kept.poll(BEGIN + second)
    for second in (0, 1, 17, 50, 99):
        start = since_offset(log, moment(second))
        first = int(next(lines_of(log, 1, 0, start, None, partial=True)).text)
        assert second - 6 <= first <= second


def test_log_line_half_written_at_poll_is_read_completely(tmp_path: Path) -> None:
    kept, log = keeper(tmp_path), AttemptPaths(tmp_path).log(0)
    log.write_text("one\ntw")
    kept.poll(BEGIN)
    with log.open("a") as handle:
        handle.write("o\nthree\n")
    kept.poll(BEGIN + 10)
    start = since_offset(log, moment(5))
    assert [line.text for line in lines_of(log, 1, 0, start, None, partial=True)] == ["two", "three"]


def test_log_index_times_stay_monotonic_after_clock_step_back(tmp_path: Path) -> None:
    kept, log = keeper(tmp_path), AttemptPaths(tmp_path).log(0)
    for count, at in enumerate((100.0, 40.0, 120.0), 1):
        log.write_text("x\n" * 40_000 * count)
        kept.poll(BEGIN + at)
    times = LogTimes(AttemptPaths(tmp_path).log_times(0).read_bytes(), log.stat().st_size)
    assert [times.time_of(80_000 * i) for i in (1, 2, 3)] == [moment(100), moment(100), moment(120)]


@pytest.mark.parametrize("damage", ["missing", "torn", "of a longer log", "garbage", "a directory"])
def test_damaged_log_index_loses_times_but_no_lines(tmp_path: Path, damage: str) -> None:
    kept, log = keeper(tmp_path), AttemptPaths(tmp_path).log(0)
    log.write_text("one\ntwo\n")
    kept.poll(BEGIN)
    index = AttemptPaths(tmp_path).log_times(0)
    whole = index.read_bytes()
    index.unlink()
    if damage == "torn":
        index.write_bytes(whole + whole[:5])
    elif damage == "of a longer log":
        index.write_bytes(whole + RECORD.pack(10**9, int((BEGIN + 9) * 1e6)))
    elif damage == "garbage":
        index.write_bytes(os.urandom(1000))
    elif damage == "a directory":
        index.mkdir()
    found = list(lines_of(log, 1, 0, 0, None, partial=True))
    assert [line.text for line in found] == ["one", "two"]
    if damage in ("torn", "of a longer log"):
        assert [line.at for line in found] == [moment(0)] * 2
    assert since_offset(log, moment(-10)) == 0


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=20),
    st.integers(1, 1100),
    st.integers(-5, 700),
)
def test_log_index_lookup_matches_linear_search(steps: list[tuple[int, int]], end: int, seconds: int) -> None:
    records, offset, time = [], 0, 0
    for grown, passed in steps:
        offset, time = offset + grown, time + passed
        records.append((offset, time))
    data = b"".join(RECORD.pack(offset, int((BEGIN + time) * 1e6)) for offset, time in records)
    times = LogTimes(data, offset)
    for asked in (end, *sorted((o for o, _ in records), reverse=True), max(1, end // 2), *(o + 1 for o, _ in records)):
        assert times.time_of(asked) == next((moment(t) for o, t in records if o >= asked), None)
    assert times.size_before(moment(seconds)) == max((o for o, t in records if t < seconds), default=0)


def test_log_lines_after_last_poll_have_no_time(tmp_path: Path) -> None:
    kept, log = keeper(tmp_path), AttemptPaths(tmp_path).log(0)
    log.write_text("one\n")
    kept.poll(BEGIN)
    with log.open("a") as handle:
        handle.write("two\n")
    assert [line.at for line in lines_of(log, 1, 0, 0, None, partial=True)] == [moment(0), None]
    assert since_offset(log, moment(0) + timedelta(seconds=1)) == 4
    assert tail_offset(log, 1) == 4
