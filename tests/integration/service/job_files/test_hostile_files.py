"""What user code may leave in the place of a file, or answer: it keeps no thread of the service's, and fills no memory."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_contract.errors import SpecError
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.protocol.counter_layout import COUNTER_MAGIC, COUNTER_WORDS, finished_step
from ratchet_contract.spec.job import JobSpec
from ratchet_service.checkpoints import cleanup
from ratchet_service.config.output_limits import DEFAULT_BOUNDS
from ratchet_service.isolation import file_access, subprocess_query
from ratchet_service.isolation.sandbox import NO_SANDBOX
from ratchet_service.job_files import delete_job, trim_logs
from ratchet_service.job_files import log_files as log_files_module
from ratchet_service.job_files.log_files import LogFilter, log_files
from ratchet_service.job_files.rank_log import tail_offset
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.launch_file import read_launch_file
from ratchet_service.preflight import interpreter
from ratchet_service.preflight.report import Report
from ratchet_service.reconciler import finish_attempt
from ratchet_service.reconciler.drain_spools import batches
from ratchet_service.usecases.logs import read_lines
from ratchet_service.user_code import snapshot
from ratchet_service.user_code.interpreter_probe import Interpreters
from ratchet_store.filesystem.durable_io import remove_tree
from tests.support.api import Api

JOB = "job-0123456789ab"


@pytest.mark.parametrize("endless", [False, True])
def test_fifo_or_endless_device_in_place_of_a_job_file_does_not_block(tmp_path: Path, endless: bool) -> None:
    """A FIFO that nobody writes to, and /dev/zero: neither holds a thread of the service's, nor fills its memory."""
    job = HomePaths(tmp_path).job(JOB)
    paths = job.attempt(1)
    places = (paths.agent_log, paths.launch_file, paths.base_file, paths.log(0), paths.spool(0), paths.counter(0))
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        if endless:
            place.symlink_to("/dev/zero")
        else:
            os.mkfifo(place)
    assert (
        attempt_files.tail(paths.agent_log, 100) == ""
        and read_launch_file(paths) is None
        and finish_attempt._read_base(paths) is None
    )
    assert list(read_lines(job, LogFilter())) == [] and tail_offset(paths.log(0), 5) == 0
    with pytest.raises(PermissionError, match="not a regular file"):
        next(batches(paths.spool(0), 0, 0))
    assert finished_step(paths.counter(0)) == 0


def test_log_listing_reads_a_bounded_number_of_directory_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logs, a follower's every line would carry a mark of them all; each request would list and open them."""
    job = HomePaths(tmp_path).job(JOB)
    paths = job.attempt(1)
    for folder in (paths.log(0).parent, paths.spool(0).parent, paths.counter(0).parent):
        folder.mkdir(parents=True)
    for rank in range(400):
        paths.log(rank).write_text("line\n")
        paths.spool(rank).touch()
    (job.root / "attempts" / "00001").mkdir()  # the same number once more
    listed = list[str]()
    real = os.scandir

    def scanned(folder: Any) -> Any:
        with real(folder) as found:
            for entry in found:
                listed.append(entry.name)
                yield entry

    monkeypatch.setattr(os, "scandir", lambda folder: contextlib.closing(scanned(folder)))
    monkeypatch.setattr(log_files_module, "MAX_NAMES", 300)
    monkeypatch.setattr(log_files_module, "MAX_RANKS", 50)
    found = log_files(job, LogFilter())
    assert len(listed) <= 302 and len(found) == 50 and {attempt for attempt, _, _ in found} == {1}
    for attempt in range(2, 30):
        job.attempt(attempt).log(0).parent.mkdir(parents=True)
        job.attempt(attempt).log(0).touch()
    monkeypatch.setattr(log_files_module, "_MAX_ATTEMPTS", 9)
    assert {attempt for attempt, _, _ in log_files(job, LogFilter(3, 20))} == set(range(12, 21))
    assert {attempt for attempt, _, _ in log_files(job, LogFilter(29))} == {29}
    listed.clear()
    assert [rank for _, rank, _ in log_files(job, LogFilter(last=1, rank=399))] == [399] and len(listed) == 30
    with file_access.as_owner(job.root):
        assert len(file_access.names_in(paths.spool(0).parent, 7)) == 7
        assert file_access.names_in(paths.log(0), 7) == file_access.names_in(job.root / "none") == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_counters_that_the_disk_or_the_process_cannot_list_now_are_listed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The last step of a killed attempt is stored once: 0 would stay."""
    job = HomePaths(tmp_path).job(JOB)
    paths = job.attempt(1)
    for folder in (paths.counter(0).parent, paths.spool(0).parent):
        folder.mkdir(parents=True)
    paths.counter(0).write_bytes(COUNTER_WORDS.pack(COUNTER_MAGIC, 7, 7, 7, 0, 0, 0, 0))
    evidence: Any = SimpleNamespace(state=SimpleNamespace(results=[], nodes=[None]))
    real = os.scandir

    def scandir(folder: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match=os.strerror(number)):
        finish_attempt._last_step(evidence, paths)
    trim_logs.drop_spools(job, 1, DEFAULT_BOUNDS)
    cleanup.scan_disk(job, [], 1)
    monkeypatch.setattr(os, "scandir", real)
    assert finish_attempt._last_step(evidence, paths) == 7


def test_log_listing_leaves_out_the_oldest_attempts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of an earlier attempt has made as many files beside its logs as are listed in all."""
    job = HomePaths(tmp_path).job(JOB)
    for attempt in (1, 2, 3):
        job.attempt(attempt).log(0).parent.mkdir(parents=True)
        job.attempt(attempt).log(0).touch()
        job.attempt(attempt).log(1).touch()
    for number in range(40):
        (job.attempt(1).log(0).parent / f"made-{number}").touch()
    monkeypatch.setattr(log_files_module, "MAX_NAMES", 30)
    found = [(attempt, rank) for attempt, rank, _ in log_files(job, LogFilter()) if attempt > 1]
    assert found == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_spool_message_of_unbounded_length_is_not_read_completely(tmp_path: Path) -> None:
    spool = tmp_path / "spool.jsonl"
    with spool.open("wb") as file:
        file.write(b"{}\n")
        file.truncate(1 << 40)
    (batch,) = batches(spool, 0, 0)
    assert [message.kind for message in batch.messages] == ["note", "note"]


def test_entrypoint_check_does_not_read_a_fifo_or_endless_module(tmp_path: Path) -> None:
    """An interpreter of the submitter's own says which file the module is."""
    spec = {"name": "a", "task": {"entrypoint": "m:T"}, "world": {"device": "cpu"}}
    task, report = JobSpec.model_validate(spec).task, Report()
    os.mkfifo(tmp_path / "m.py")
    assert task is not None
    for origin in (Path("/dev/zero"), tmp_path / "m.py"):
        interpreter._check_entrypoint(task, origin, NO_SANDBOX, report)
    assert report.problems == []


def test_last_line_of_a_huge_stderr_file_is_read_alone(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+b") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nat last\n")
        assert subprocess_query.last_line(file) == "at last"


def test_delete_replaces_a_fifo_in_place_of_its_mark(tmp_path: Path) -> None:
    homes = HomePaths(tmp_path)
    job = homes.job(JOB)
    job.root.mkdir(parents=True)
    os.mkfifo(job.root / delete_job.MARKER_NAME)
    delete_job._write_marker(job, delete_job._Mark(keep_checkpoints=True))
    assert json.loads((job.root / delete_job.MARKER_NAME).read_text())["keep_checkpoints"] is True
    assert delete_job._remove_files(homes, JOB) is None and not job.root.exists()


@pytest.mark.parametrize(
    ("replace", "why"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to(path.name), "symbolic links"),
    ],
    ids=["fifo", "directory", "link loop"],
)
def test_snapshot_refuses_a_file_replaced_by_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Callable[[Path], None], why: str
) -> None:
    code, choose = tmp_path / "code", snapshot.choose
    code.mkdir()
    (code / "main.py").write_text("x")

    def swapped(*given: Any, **more: Any) -> Any:
        found = choose(*given, **more)
        (code / "main.py").unlink()
        replace(code / "main.py")
        return found

    monkeypatch.setattr(snapshot, "choose", swapped)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SpecError, match=why) as refused:
        snapshot.snapshot(code, tmp_path / "kept")
    assert [(p.pointer, p.code) for p in refused.value.errors] == [("/code/path", "unreadable")]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def deep(folder: Path, levels: int) -> None:
    """Directories in one another, more than a path can name, the innermost locked."""
    folder.mkdir(parents=True)
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("in", dir_fd=fd)
        inner = os.open("in", os.O_RDONLY, dir_fd=fd)
        os.close(os.open("file", os.O_CREAT, 0o400, dir_fd=inner))
        os.close(fd)
        fd = inner
    os.fchmod(fd, 0)
    os.close(fd)


def test_remove_tree_removes_any_depth_and_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    deep(tmp_path / "gone", 3000)
    (tmp_path / "gone" / "in" / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "gone")
    remove_tree(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept" / "file").exists()


def test_remove_tree_of_a_link_changes_nothing_behind_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    with pytest.raises(NotADirectoryError):
        remove_tree(tmp_path / "link")
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o755


def test_sweep_deleted_continues_after_a_job_that_cannot_be_removed(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [api.settings.paths.job(f"job-00000000000{i}") for i in range(3)]
    for job in jobs:
        job.root.mkdir(parents=True)
        (job.root / delete_job.MARKER_NAME).write_text('{"uri": [' if job == jobs[2] else "{}")
    real = delete_job._remove_unkept_files

    def refused(paths: JobPaths, homes: HomePaths) -> object:
        if paths == jobs[0]:
            raise PermissionError(1, "Operation not permitted")
        return real(paths, homes)

    monkeypatch.setattr(delete_job, "_remove_unkept_files", refused)
    with caplog.at_level(logging.ERROR):
        assert delete_job.sweep_deleted(api.database, api.settings.paths) == [jobs[1].root.name]
    assert jobs[0].root.name in caplog.text and jobs[0].root.exists() and not jobs[1].root.exists()
    assert jobs[2].root.name in caplog.text


def test_sweep_deleted_continues_after_a_marker_that_cannot_be_opened(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [api.settings.paths.job(f"job-11111111111{i}") for i in range(2)]
    for job in jobs:
        job.root.mkdir(parents=True)
        (job.root / delete_job.MARKER_NAME).touch()  # empty: of a submission whose disk was full
    real = delete_job.lock_is_held

    def broken(path: Path) -> bool:
        if path.parent == jobs[0].root:
            raise OSError(errno.EIO, "Input/output error")  # as of a network file system
        return real(path)

    monkeypatch.setattr(delete_job, "lock_is_held", broken)
    with caplog.at_level(logging.ERROR):
        done = delete_job.sweep_deleted(api.database, api.settings.paths)
    assert jobs[1].root.name in done and jobs[0].root.name not in done
    assert jobs[0].root.name in caplog.text and jobs[0].root.exists() and not jobs[1].root.exists()


@pytest.mark.parametrize("answer", ["[]", "[" * 100_000, "3"])
def test_subprocess_query_with_an_invalid_answer_raises(answer: str) -> None:
    script = "import json, os, sys; os.write(json.load(sys.stdin)['answer'], sys.argv[1].encode())"
    with pytest.raises(ValueError, match="its answer"):
        subprocess_query.query_process(
            [sys.executable, "-c", script, answer],
            {},
            cwd="/",
            env={},
            timeout_seconds=60,
        )


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_subprocess_query_killed_by_a_signal_says_which(number: int, name: str) -> None:
    script = "import os, sys; os.kill(os.getpid(), int(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(number)]
    with pytest.raises(ValueError, match=f"^killed by {name}$"):
        subprocess_query.query_process(command, {}, cwd="/", env={}, timeout_seconds=60)


@pytest.mark.parametrize("wrong", [{"version": ["a", 3]}, {"origin": 7}, {"torch_version": []}])
def test_interpreter_with_a_malformed_answer_is_unusable(tmp_path: Path, wrong: dict[str, object]) -> None:
    """A program of the submitter's own in the place of one."""
    answer = {"version": [3, 12, 1], "torch": False, "torch_cuda": False, **wrong}
    program = tmp_path / "python"
    text = f"#!{sys.executable}\nimport json, os, sys\n"
    program.write_text(text + f"os.write(json.load(sys.stdin)['answer'], {json.dumps(answer).encode()!r})\n")
    program.chmod(0o755)
    assert Interpreters().query(str(program)).error is not None
