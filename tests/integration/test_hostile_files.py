"""What user code may leave in the place of a file, or answer: it keeps no thread of the service's, and fills no memory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.counter import finished_step
from ratchet_contract.errors import SpecError
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.spec import JobSpec
from ratchet_service import children, ending, file_owner, preflight_python, snapshot
from ratchet_service.confined import OWN
from ratchet_service.interpreters import Interpreters
from ratchet_service.launch_files import read_launch_file
from ratchet_service.launchers import files
from ratchet_service.leftover import batches
from ratchet_service.log_lines import tail_offset
from ratchet_service.preflight_report import Report
from ratchet_service.usecases import deletion, logs
from ratchet_service.usecases.logs import LogFilter, read_lines
from ratchet_store.files import remove_tree
from tests.support.api import Api

JOB = "job-0123456789ab"


@pytest.mark.parametrize("endless", [False, True])
def test_what_never_begins_or_never_ends_in_the_place_of_a_file_keeps_nobody(tmp_path: Path, endless: bool) -> None:
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
    assert files.tail(paths.agent_log, 100) == "" and read_launch_file(paths) is None and ending._base(paths) is None
    assert list(read_lines(job, LogFilter())) == [] and tail_offset(paths.log(0), 5) == 0
    assert list(batches(paths.spool(0), 0, 0)) == [] and finished_step(paths.counter(0)) == 0


def test_of_a_million_files_in_a_jobs_directory_so_many_are_looked_at(
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
    monkeypatch.setattr(logs, "MOST_NAMES", 300)
    monkeypatch.setattr(logs, "MAX_MARK", 50)
    found = logs.log_files(job, LogFilter())
    assert len(listed) <= 302 and len(found) == 50 and {attempt for attempt, _, _ in found} == {1}
    for attempt in range(2, 30):
        job.attempt(attempt).log(0).parent.mkdir(parents=True)
        job.attempt(attempt).log(0).touch()
    monkeypatch.setattr(logs, "_MOST_ATTEMPTS", 9)
    assert {attempt for attempt, _, _ in logs.log_files(job, LogFilter(3, 20))} == set(range(12, 21))
    assert {attempt for attempt, _, _ in logs.log_files(job, LogFilter(29))} == {29}
    listed.clear()
    assert [rank for _, rank, _ in logs.log_files(job, LogFilter(last=1, rank=399))] == [399] and len(listed) == 30
    with file_owner.as_owner(job.root):
        assert len(file_owner.names_in(paths.spool(0).parent, 7)) == 7
        assert file_owner.names_in(paths.log(0), 7) == file_owner.names_in(job.root / "none") == []


def test_a_message_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    spool = tmp_path / "spool.jsonl"
    with spool.open("wb") as file:
        file.write(b"{}\n")
        file.truncate(1 << 40)
    (batch,) = batches(spool, 0, 0)
    assert [message.kind for message in batch.messages] == ["note", "note"]


def test_a_module_without_an_end_is_not_read(tmp_path: Path) -> None:
    """An interpreter of the submitter's own says which file the module is."""
    spec = {"name": "a", "task": {"entrypoint": "m:T"}, "world": {"device": "cpu"}}
    task, report = JobSpec.model_validate(spec).task, Report()
    os.mkfifo(tmp_path / "m.py")
    assert task is not None
    for origin in (Path("/dev/zero"), tmp_path / "m.py"):
        preflight_python._check_entrypoint(task, origin, OWN, report)
    assert report.problems == []


def test_of_what_a_process_prints_the_last_line_is_read_alone(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+b") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nat last\n")
        assert children.last_line(file) == "at last"


def test_no_fifo_in_the_place_of_a_deletions_mark_keeps_it_from_being_made(tmp_path: Path) -> None:
    homes = HomePaths(tmp_path)
    job = homes.job(JOB)
    job.root.mkdir(parents=True)
    os.mkfifo(job.root / deletion.MARK)
    deletion._write_mark(job, deletion._Mark(keep_checkpoints=True))
    assert json.loads((job.root / deletion.MARK).read_text())["keep_checkpoints"] is True
    assert deletion._remove_files(homes, JOB) is None and not job.root.exists()


def test_a_file_that_has_become_a_fifo_since_it_was_found_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, choose = tmp_path / "code", snapshot.choose
    code.mkdir()
    (code / "main.py").write_text("x")

    def swapped(*given: Any, **more: Any) -> Any:
        found = choose(*given, **more)
        (code / "main.py").unlink()
        os.mkfifo(code / "main.py")
        return found

    monkeypatch.setattr(snapshot, "choose", swapped)
    with pytest.raises(SpecError, match="no regular file"):
        snapshot.snapshot(code, tmp_path / "kept")


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


def test_a_tree_of_any_depth_is_removed_and_nothing_behind_its_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    deep(tmp_path / "gone", 3000)
    (tmp_path / "gone" / "in" / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "gone")
    remove_tree(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept" / "file").exists()


def test_a_deletion_that_cannot_be_finished_keeps_no_other_from_it(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [api.settings.paths.job(f"job-00000000000{i}") for i in range(3)]
    for job in jobs:
        job.root.mkdir(parents=True)
        (job.root / deletion.MARK).write_text('{"uri": [' if job == jobs[2] else "{}")
    real = deletion._remove_what_goes

    def refused(paths: JobPaths, homes: HomePaths) -> object:
        if paths == jobs[0]:
            raise PermissionError(1, "Operation not permitted")
        return real(paths, homes)

    monkeypatch.setattr(deletion, "_remove_what_goes", refused)
    with caplog.at_level(logging.ERROR):
        assert deletion.sweep_deleted(api.database, api.settings.paths) == [jobs[1].root.name]
    assert jobs[0].root.name in caplog.text and jobs[0].root.exists() and not jobs[1].root.exists()
    assert jobs[2].root.name in caplog.text


@pytest.mark.parametrize("answer", ["[]", "[" * 100_000, "3"])
def test_an_answer_that_is_none_is_told_as_that(answer: str) -> None:
    script = "import json, os, sys; os.write(json.load(sys.stdin)['answer'], sys.argv[1].encode())"
    with pytest.raises(ValueError, match="its answer"):
        children.ask(
            [sys.executable, "-c", script, answer],
            {},
            cwd="/",
            env={},
            seconds=60,
        )


@pytest.mark.parametrize("wrong", [{"version": ["a", 3]}, {"origin": 7}, {"torch_version": []}])
def test_an_interpreter_that_answers_something_else_is_unusable(tmp_path: Path, wrong: dict[str, object]) -> None:
    """A program of the submitter's own in the place of one."""
    answer = {"version": [3, 12, 1], "torch": False, "torch_cuda": False, **wrong}
    program = tmp_path / "python"
    text = f"#!{sys.executable}\nimport json, os, sys\n"
    program.write_text(text + f"os.write(json.load(sys.stdin)['answer'], {json.dumps(answer).encode()!r})\n")
    program.chmod(0o755)
    assert Interpreters().ask(str(program)).error is not None
