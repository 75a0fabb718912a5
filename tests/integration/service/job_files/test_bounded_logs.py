"""Logs that are bounded while they are written and read: offsets stay, the gap is told, nothing comes twice; and logs that are
followed while agent and node are gone."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ratchet_contract.api.views import LogLine
from ratchet_contract.checkpoint.step_ring import RING_ATTEMPTS
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import Cause, JobPhase
from ratchet_service.app import create_app
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.engine import Database
from ratchet_service.db.transitions import add_event, lock_job
from ratchet_service.isolation import file_access
from ratchet_service.job_files import rank_log, trim_logs
from ratchet_service.job_files.log_files import LogFilter
from ratchet_service.job_files.rank_log import lines_of, tail_offset
from ratchet_service.job_files.trim_logs import record_event, shorten
from ratchet_service.usecases.logs import Follower, read_lines
from ratchet_store.filesystem import sparse
from tests.support.api import Api, FakeSubmission, Server
from tests.support.attempts import Attempt as RunningAttempt
from tests.support.rank_logs import log_keeper, write
from tests.support.run_as import AS_ROOT, UID, open_home
from tests.support.server import wait_for

MIB = 1 << 20
COUNT = 30_000
pytestmark = pytest.mark.skipif(
    sparse.unsupported_reason(Path("/tmp")) is not None,
    reason="files in /tmp cannot have holes; a /tmp on ext4, xfs, btrfs or tmpfs runs these",
)


def numbered(first: int, count: int) -> str:
    return "".join(f"{number:09d} {'x' * 90}\n" for number in range(first, first + count))


def numbers(lines: list[LogLine]) -> list[int | None]:
    """None for a gap."""
    return [None if line.left_out else int(line.text[:9]) for line in lines]


def all_lines(path: Path, start: int = 0, grep: str | None = None) -> list[LogLine]:
    return list(lines_of(path, 1, 0, start, grep, partial=True))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``COUNT`` lines of 101 bytes, bounded to 1 MiB while they were written."""
    paths = AttemptPaths(tmp_path_factory.mktemp("long"))
    keeper = log_keeper(paths, MIB)
    for first in range(0, COUNT, 5000):
        write(paths.log(0), numbered(first, 5000))
        keeper.poll(1e9 + first)
    return paths.log(0)


def test_bounded_log_keeps_its_beginning_and_end_with_one_gap(long: Path) -> None:
    found = all_lines(long)
    shown = numbers(found)
    gap = shown.index(None)
    assert shown[0] == 0 and shown[-1] == COUNT - 1 and shown.count(None) == 1
    whole = found[: gap - 1]  # the line before the gap may have lost its end
    assert numbers(whole) == list(range(gap - 1)) and len(whole) * 101 >= 250 * 1024
    assert numbers(found[gap + 1 :]) == list(range(int(found[gap + 1].text[:9]), COUNT))
    assert long.stat().st_size == COUNT * 101, "offsets must stay"
    assert long.stat().st_blocks * 512 <= MIB
    left_out = found[gap].left_out
    assert left_out is not None and left_out > 1.5 * MIB and str(left_out) in found[gap].text
    assert all(line.id == f"1.0.{(int(line.text[:9]) + 1) * 101}" for line in [*whole, *found[gap + 1 :]])


def test_log_line_id_resumes_reading_at_the_next_line(long: Path) -> None:
    found = all_lines(long)
    for line, following in zip(found[::997], found[1::997], strict=False):
        after = int(line.id.rpartition(".")[2])
        assert next(lines_of(long, 1, 0, after, None, partial=True)).text == following.text


@pytest.mark.parametrize("lines", [1, 100, 3000, 25_000])
def test_log_tail_across_the_gap_includes_the_gap_line(long: Path, lines: int) -> None:
    found = numbers(all_lines(long, tail_offset(long, lines)))
    kept = numbers(all_lines(long))
    behind = len(kept) - kept.index(None) - 1
    if lines <= behind:
        assert found == list(range(COUNT - lines, COUNT))
    else:
        assert found == kept[kept.index(None) :]


@pytest.mark.parametrize("text", ["000000007", "000029998 x", "00002999", "000015000", "xxx", "", "�", "y\nz"])
def test_log_search_in_blocks_equals_line_by_line_search(
    long: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [line for line in all_lines(long) if line.left_out is not None or text in line.text]
    for searched in (1 << 20, 4096, 150):  # blocks in which lines, or not one of them, find room
        monkeypatch.setattr(rank_log, "_SEARCH_BLOCK", searched)
        assert all_lines(long, grep=text) == expected


@pytest.mark.timeout(30)
def test_log_search_ends_if_the_job_cuts_the_log_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-00000.log"
    path.write_text("needle\n" + "hay\n" * 100_000)
    monkeypatch.setattr(rank_log, "_SEARCH_BLOCK", 150)
    found = lines_of(path, 1, 0, 0, "needle", partial=False)
    assert next(found).text == "needle"
    os.truncate(path, 50)
    assert list(found) == []


def test_log_search_finds_text_in_lines_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-00000.log"
    path.write_text(
        "short needle\n" + "a" * 150_000 + "needle" + "b" * 200_000 + "\nneedle\nno\n" + "c" * 70_000 + "needle"
    )
    expected = [line for line in all_lines(path) if "needle" in line.text]
    assert len(expected) >= 4
    for searched in (1 << 20, 4096):
        monkeypatch.setattr(rank_log, "_SEARCH_BLOCK", searched)
        assert all_lines(path, grep="needle") == expected


def test_reading_a_log_while_a_hole_is_punched_returns_no_zero_bytes(tmp_path: Path) -> None:
    paths = AttemptPaths(tmp_path)
    log_keeper(paths)
    write(paths.log(0), numbered(0, 60_000))
    size = paths.log(0).stat().st_size
    reading = lines_of(paths.log(0), 1, 0, 0, None, partial=True)
    found = [next(reading) for _ in range(100)]
    sparse.punch_hole(paths.log(0), 1 * MIB, size - 1 * MIB)
    found += list(reading)
    assert not any("\0" in line.text for line in found)
    shown = numbers([line for line in found if line.left_out or len(line.text) == 100])
    assert shown.count(None) == 1 and shown[0] == 0 and shown[-1] == 59_999
    real = [number for number in shown if number is not None]
    assert real == sorted(set(real))


def follow_all(follower: Follower) -> list[tuple[str, LogLine]]:
    out: list[tuple[str, LogLine]] = []
    while found := follower.poll(1000):
        out += found
    return out


def test_log_follower_sees_every_line_or_one_gap_when_too_slow(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    paths = job.attempt(1)
    keeper = log_keeper(paths, MIB)
    quick, slow = Follower(job, LogFilter()), Follower(job, LogFilter())
    seen = []
    for first in range(0, 25_000, 5000):
        write(paths.log(0), numbered(first, 5000))
        seen += numbers([line for _, line in follow_all(quick)])
        if first == 0:
            begun = slow.poll(1000)
        keeper.poll(1e9 + first)
    assert seen == list(range(25_000))
    late = Follower(job, LogFilter(), mark=begun[-1][0])  # as after a restart of the service
    for follower in (slow, late):
        rest = numbers([line for _, line in follow_all(follower)])
        assert rest.count(None) == 1 and rest[-1] == 24_999
        real = [number for number in rest if number is not None]
        assert real == sorted(set(real)) and real[0] == 1000
    gap = next(mark for mark, line in follow_all(Follower(job, LogFilter())) if line.left_out)
    after = numbers([line for _, line in follow_all(Follower(job, LogFilter(), mark=gap))])
    assert None not in after and after[-1] == 24_999


def test_agent_notes_once_that_logs_were_shortened_or_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened, unable = JobPaths(tmp_path / "a").attempt(1), JobPaths(tmp_path / "b").attempt(1)
    for paths in (shortened, unable):
        keeper = log_keeper(paths, MIB, ranks=2)
        for rank in (0, 1):
            write(paths.log(rank), numbered(0, 30_000))
        if paths is unable:
            monkeypatch.setattr(sparse, "_PUNCH_HOLE", 0x100)  # what a file system answers that knows no such call
        for second in range(3):
            keeper.poll(1e9 + second)
        told = [json.loads(line) for line in paths.node_spool(0).read_text().splitlines()]
        assert [line["type"] for line in told] == ["log-shortened" if paths is shortened else "logs-unbounded"]
        blocks = [paths.log(rank).stat().st_blocks * 512 for rank in (0, 1)]
        assert max(blocks) <= MIB if paths is shortened else min(blocks) > 2 * MIB
    assert "without bound" in told[0]["message"] and "Operation not supported" in told[0]["message"]


def test_log_that_the_agent_cannot_process_is_noted_once_and_other_logs_are_bounded(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path).attempt(1)
    keeper = log_keeper(paths, MIB, ranks=2)
    paths.log_times(0).mkdir()  # where the index of its lines' times would be
    for rank in (0, 1):
        write(paths.log(rank), numbered(0, 30_000))
    for second in range(3):
        keeper.poll(1e9 + second)
    told = [json.loads(line) for line in paths.node_spool(0).read_text().splitlines()]
    assert [line["type"] for line in told] == ["log-not-kept", "log-shortened"]
    assert told[0]["message"] == f"the size of {paths.log(0)} cannot be limited: Is a directory"
    assert paths.log(0).stat().st_blocks * 512 > 2 * MIB and paths.log(1).stat().st_blocks * 512 <= MIB


def test_agent_note_about_its_node_becomes_a_job_event(api: Api) -> None:
    job = api.submit()
    api.attempt(job)
    note = {"kind": "note", "rank": -2, "at": "2030-01-01T00:00:00Z", "type": "logs-unbounded", "message": "m"}
    assert api.report(job, (-2, 1, [note])).json()["acked"] == {"-2": 1}
    (event,) = [e for e in api.client.get(f"/v1/jobs/{job}/events").json()["items"] if e["type"] != "submitted"]
    assert (event["type"], event["attempt"], event["data"]) == ("note.logs-unbounded", 1, {"node": 0, "data": {}})
    refused = api.report(job, (-3, 1, [note]))  # another node's agent
    assert refused.json()["code"] == "invalid-report"


def test_shorten_trims_logs_of_middle_attempts_and_keeps_first_and_last(api: Api) -> None:
    job_id = api.submit()
    paths = api.settings.paths.job(job_id)
    for attempt in range(1, 9):
        for rank in (0, 1):
            write(paths.attempt(attempt).log(rank), numbered(0, 10_000))  # 1 MB
    written = paths.attempt(4).log(0).stat().st_mtime_ns
    bounds = Bounds(job_log_bytes=11 * MIB, log_attempts=2)
    assert shorten(paths, 8, Bounds(job_log_bytes=20 * MIB)) is None
    shortened = shorten(paths, 8, bounds)
    assert shortened is not None and (shortened.attempts, shortened.removed) == ([3, 4, 5], False)
    assert paths.attempt(4).log(0).stat().st_mtime_ns == written
    for attempt in range(1, 9):
        lines = numbers(list(read_lines(paths, LogFilter(attempt, attempt, rank=0))))
        if attempt in (3, 4, 5):
            assert lines[0] == 0 and None in lines and lines[-1] == 9999 and len(lines) < 2000
        else:
            assert lines == list(range(10_000))
    assert shorten(paths, 8, bounds) is None, "what is done is not done again"
    with api.database.write() as session:
        record_event(session, lock_job(session, job_id), 8, shortened)
    event = api.client.get(f"/v1/jobs/{job_id}/events").json()["items"][-1]
    assert (event["type"], event["attempt"], event["data"]["attempts"]) == ("logs-shortened", 8, [3, 4, 5])
    assert event["data"]["bytes"] >= 4 * MIB


def test_shorten_without_hole_punching_removes_old_logs_and_spools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, begin: int, end: int) -> int:
        raise OSError(errno.EOPNOTSUPP, "not supported", str(path))

    monkeypatch.setattr(trim_logs, "punch_hole", refuse)
    paths, bounds = JobPaths(tmp_path), Bounds(job_log_bytes=MIB, log_attempts=2)
    for attempt in range(1, 7):
        write(paths.attempt(attempt).log(0), numbered(0, 4000))
        write(paths.attempt(attempt).spool(0), "{}\n")
        write(paths.attempt(attempt).ring(0), "of steps")
    (paths.attempt(1).root.parent / "\u00b2").mkdir()  # user code may have made it: a digit, but no number
    shortened = shorten(paths, 6, bounds)
    assert shortened is not None and (shortened.attempts, shortened.removed) == ([3, 4], True)
    trim_logs.drop_spools(paths, 6, bounds)
    assert [a for a in range(1, 7) if paths.attempt(a).log(0).exists()] == [1, 2, 5, 6]
    assert [a for a in range(1, 7) if paths.attempt(a).spool(0).exists()] == [5, 6]
    trim_logs.drop_spools(paths, RING_ATTEMPTS + 2, bounds)
    assert [a for a in range(1, 7) if paths.attempt(a).ring(0).exists()] == [3, 4, 5, 6]


def test_event_of_shortened_and_removed_logs_names_both(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, real = api.submit(), trim_logs.punch_hole
    paths = api.settings.paths.job(job_id)

    def refuse(path: Path, begin: int, end: int) -> int:
        if path == paths.attempt(2).log(0):
            raise OSError(errno.EOPNOTSUPP, "not supported", str(path))
        return real(path, begin, end)

    monkeypatch.setattr(trim_logs, "punch_hole", refuse)
    for attempt in range(1, 5):
        write(paths.attempt(attempt).log(0), numbered(0, 10_000))
    shortened = shorten(paths, 4, Bounds(job_log_bytes=MIB, log_attempts=1))
    with api.database.write() as session:
        record_event(session, lock_job(session, job_id), 4, shortened)
    event = api.client.get(f"/v1/jobs/{job_id}/events").json()["items"][-1]
    text = "logs of attempts 2, 3 were removed or keep 64 KiB at their beginning and at their end"
    assert (event["message"], event["data"]["removed"]) == (text, True)


@AS_ROOT
def test_shorten_skips_logs_that_another_user_keeps_from_being_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, begin: int, end: int) -> int:
        raise OSError(errno.EOPNOTSUPP, "not supported", str(path))

    monkeypatch.setattr(trim_logs, "punch_hole", refuse)
    with open_home() as home:
        paths, bounds = home.job("job-0123456789ab"), Bounds(job_log_bytes=MIB // 2, log_attempts=1)
        for attempt in range(1, 5):
            write(paths.attempt(attempt).log(0), numbered(0, 4000))
        file_access.give_to_user(paths.root, UID, UID)
        paths.attempt(2).log(0).parent.chmod(0o555)
        shortened = shorten(paths, 4, bounds)
        assert shortened is not None and shortened.attempts == [3] and shortened.nbytes < MIB
        assert [a for a in range(1, 5) if paths.attempt(a).log(0).exists()] == [1, 2, 4]


def stream(api: Api, job: str, last: str | None, stop: int) -> list[tuple[str, str]]:
    """Ids and texts of ``stop`` events of a follower that then breaks off."""
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
    out: list[tuple[str, str]] = []
    with api.client.stream("GET", f"/v1/jobs/{job}/logs?follow=true&attempt=all", headers=headers) as answer:
        id_ = ""
        for line in answer.iter_lines():
            field, _, value = line.partition(": ")
            if field == "id":
                id_ = value
            elif field == "data" and value != "{}":
                out.append((id_, json.loads(value)["text"]))
            if len(out) == stop or line == "event: end":
                break
    return out


def test_log_stream_continues_across_service_restarts_gaps_and_attempts(
    api: Api, database: Database, tmp_path: Path
) -> None:
    """Each service is a new one over the same rows and files, on another port."""
    job = api.submit()
    api.attempt(job)
    paths = api.settings.paths.job(job).attempt(1)
    keeper = log_keeper(paths, MIB)
    write(paths.log(0), numbered(0, 100))
    seen: list[tuple[str, str]] = []

    def follow(stop: int) -> list[str]:
        with (
            Server(create_app(api.settings, FakeSubmission(), database)) as url,
            httpx.Client(base_url=url, timeout=30, verify=False) as client,
        ):
            found = stream(replace(api, client=client), job, seen[-1][0] if seen else None, stop)
        seen.extend(found)
        return [text for _, text in found]

    assert follow(40)[-1].startswith("000000039")
    write(paths.log(0), numbered(100, 30_000))
    keeper.poll(1e9)
    assert follow(60)[-1].startswith("000000099")
    behind = follow(5000)
    assert behind[0].startswith("000000100") and sum("left out" in text for text in behind) == 1
    api.attempt(job, number=2)
    write(api.settings.paths.job(job).attempt(2).log(0), "second attempt\n")
    rest = follow(30_000) if api.set_phase(job, JobPhase.SUCCEEDED) is None else []
    assert rest[-1] == "second attempt" and rest[-2].startswith("000030099")
    real = [text[:9] for _, text in seen if "left out" not in text]
    assert real == [*sorted(set(real[:-1])), "second at"]


def test_event_stream_continues_across_service_restarts(api: Api, database: Database) -> None:
    job = api.submit()
    api.attempt(job)
    seen: list[str] = []
    for number in range(3):
        with database.write() as session:
            add_event(session, lock_job(session, job).id, "n", str(number), attempt=1)
        with (
            Server(create_app(api.settings, FakeSubmission(), database)) as url,
            httpx.Client(base_url=url, timeout=30, verify=False) as client,
            client.stream(
                "GET",
                f"/v1/jobs/{job}/events?follow=true",
                headers={"Last-Event-ID": str(json.loads(seen[-1])["id"])} if seen else {},
            ) as answer,
        ):
            found = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            seen += [next(found) for _ in range(2 if number == 0 else 1)]
    assert [json.loads(event)["message"] for event in seen[1:]] == ["0", "1", "2"]


def test_logs_can_be_followed_after_agent_and_node_are_gone(api: Api) -> None:
    """The run directory is one for service and nodes: what ranks wrote is there whatever becomes of them."""
    job = api.submit()
    api.attempt(job)
    paths = api.settings.paths.job(job).attempt(1)
    paths.log(0).parent.mkdir(parents=True)
    script = f"import os, time\nwith open({str(paths.log(0))!r}, 'a') as f:\n  f.write('last words\\n'); f.flush(); os.kill(0, 9)"
    node = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    node.wait(30)
    assert node.returncode == -signal.SIGKILL
    first = stream(api, job, None, 1)
    assert [text for _, text in first] == ["last words"]
    shown = api.client.get(f"/v1/jobs/{job}/logs").json()["items"]
    assert [line["text"] for line in shown] == ["last words"]


def test_resumed_log_follower_ignores_tail_for_new_files(tmp_path: Path) -> None:
    """``tail`` is for the beginning alone: an attempt that came while nobody followed is read from its first line."""
    job = JobPaths(tmp_path)
    write(job.attempt(1).log(0), "a\nb\nc\n")
    ((mark, line),) = Follower(job, LogFilter(tail=1)).poll(10)
    assert line.text == "c"
    write(job.attempt(1).log(1), "x\ny\n")
    write(job.attempt(2).log(0), "d\ne\n")
    rest = Follower(job, LogFilter(tail=1), mark).poll(10)
    assert [line.text for _, line in rest] == ["x", "y", "d", "e"]


def test_agent_bounds_the_log_of_a_rank_that_keeps_writing(tmp_path: Path) -> None:
    """A real agent and a rank without torch, whose log grows from here as if it were the rank's own output."""
    attempt = RunningAttempt(tmp_path / "home", [{"steps": 10**6}], log_bytes=MIB)
    try:
        attempt.service.start()
        agent = attempt.start()
        attempt.wait_step(0)
        log = attempt.paths.log(0)
        write(log, numbered(0, 30_000))
        wait_for(lambda: log.stat().st_blocks * 512 <= MIB, "the log to be bounded", 30)
        write(log, "the last line\n")
        wait_for(lambda: len(attempt.service.messages[-2]) == 1, "the agent's word about it", 30)
        agent.terminate()
        assert attempt.wait().cause is Cause.SIGTERM
        assert attempt.service.messages[-2][0].type == "log-shortened"
        found = all_lines(log)
        assert any(line.left_out for line in found) and found[-1].text == "the last line"
        assert found[-1].at is not None, "the last look is after the ranks' end"
    finally:
        attempt.close()


def test_preallocated_blocks_beyond_the_end_do_not_trigger_log_shortening(tmp_path: Path) -> None:
    """As XFS does for files that grow; here by hand."""
    paths = AttemptPaths(tmp_path)
    keeper = log_keeper(paths, MIB)
    write(paths.log(0), numbered(0, 10_300))
    with paths.log(0).open("r+b") as handle:
        size = handle.seek(0, 2)
        assert sparse._libc.fallocate(handle.fileno(), 1, 0, 8 * MIB) == 0  # FALLOC_FL_KEEP_SIZE
        os.fsync(handle.fileno())
    assert paths.log(0).stat().st_blocks * 512 >= 8 * MIB and paths.log(0).stat().st_size == size < MIB
    keeper.poll(1e9)
    assert numbers(all_lines(paths.log(0))) == list(range(10_300))
