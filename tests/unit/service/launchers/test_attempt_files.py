"""The attempt's user may write anything where its agent's last word lies: it is bounded before it is parsed, and that is told."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_contract.atomic_write import ensure_dir
from ratchet_contract.paths import AttemptPaths, HomePaths, JobPaths
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.messages import AgentFile, AttemptResult, Resolved
from ratchet_contract.spec.job import JobSpec
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.attempt_files import MOST_BYTES, MOST_TEXT
from ratchet_service.launchers.base import AttemptRef, AttemptState
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.lifecycle.attempt_result import Evidence, cause_of
from tests.support.power_loss import Recorder, disk_states
from tests.support.run_as import AS_ROOT, UID, open_directory

AT = "2030-01-01T00:00:00+00:00"
JOB: Any = SimpleNamespace(desired=Desired.RUN, desired_cause=None)


@pytest.fixture
def ref(tmp_path: Path) -> AttemptRef:
    ref = AttemptRef("job-000000000001", 1, AttemptPaths(tmp_path), 1)
    ref.paths.node(0).agent_file.write_text(AgentFile(pid=1, start_time=1, host="h").model_dump_json())
    return ref


def written(ref: AttemptRef, message: str) -> None:
    result = AttemptResult(
        job_id=ref.job_id, attempt=1, cause=Cause.EXCEPTION, message=message, last_step=3, started_at=AT, ended_at=AT,
        ranks=[],
    )  # fmt: skip
    ref.paths.node(0).result_file.write_text(result.model_dump_json())


def end_of(ref: AttemptRef) -> tuple[Cause, str | None]:
    found = cause_of(JOB, Evidence(AttemptState(False, attempt_files.node_states(ref))))
    return found.cause, found.message


def test_attempt_result_within_limits_is_read_unchanged(ref: AttemptRef) -> None:
    written(ref, "x" * MOST_TEXT)
    assert end_of(ref) == (Cause.EXCEPTION, "x" * MOST_TEXT)


def test_attempt_result_over_size_limit_is_not_parsed(ref: AttemptRef, monkeypatch: pytest.MonkeyPatch) -> None:
    written(ref, "x" * MOST_BYTES)

    def parsed(*_: Any) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(AttemptResult, "model_validate_json", parsed)
    cause, message = end_of(ref)
    assert cause is Cause.UNKNOWN
    assert message == "result.json of node 0 has more than 4 MiB, which no agent writes: it was not read"


def test_attempt_result_long_message_is_truncated_with_note(ref: AttemptRef) -> None:
    written(ref, "x" * (MOST_TEXT + 7))
    assert end_of(ref) == (Cause.EXCEPTION, "x" * MOST_TEXT + " ... (7 more characters left out)")


def test_attempt_files_that_are_fifo_or_device_do_not_block(ref: AttemptRef) -> None:
    os.mkfifo(ref.paths.node(0).result_file)
    assert attempt_files.node_states(ref)[0].result is None
    ref.paths.node(0).agent_file.unlink()
    ref.paths.node(0).agent_file.symlink_to("/dev/zero")
    assert not attempt_files.node_states(ref)[0].seen


@pytest.mark.parametrize(
    ("changes", "cause", "says"),
    [
        ({"weather": "fine"}, Cause.EXCEPTION, "why"),
        (
            {"cause": "sigterm", "ranks": [{"rank": 0, "exit_code": 143, "last_step": 3, "mood": 1}]},
            Cause.SIGTERM,
            "why",
        ),
        ({"cause": "melted"}, Cause.UNKNOWN, "uses protocol 99, which this service (1) cannot read"),
        ({"ranks": {"0": 143}}, Cause.UNKNOWN, "uses protocol 99"),
    ],
)
@pytest.mark.parametrize("asked", [None, Cause.UPGRADE])
def test_attempt_result_of_other_protocol_is_read_as_far_as_known(
    ref: AttemptRef, changes: dict[str, Any], cause: Cause, says: str, asked: Cause | None
) -> None:
    """Who was asked to end for it has ended so, unless it tells of a failure."""
    written(ref, "why")
    file = ref.paths.node(0).result_file
    file.write_text(json.dumps(json.loads(file.read_text()) | {"protocol": 99} | changes))
    found = cause_of(JOB, Evidence(AttemptState(False, attempt_files.node_states(ref)), forced_cause=asked))
    assert found.cause is (Cause.UPGRADE if asked is not None and cause is not Cause.EXCEPTION else cause)
    assert says in str(found.message)


@pytest.mark.parametrize(
    "changes",
    [{"cause": "melted"}, {"attempt": 2}, {"protocol": 99, "cause": "melted", "attempt": 2}, {"protocol": None}],
)
def test_attempt_result_invalid_or_of_other_attempt_is_ignored(ref: AttemptRef, changes: dict[str, Any]) -> None:
    written(ref, "why")
    file = ref.paths.node(0).result_file
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert attempt_files.node_states(ref)[0].result is None


@AS_ROOT
@pytest.mark.parametrize("mode", [0, 0o444, 0o555])
@pytest.mark.parametrize("closed", ["attempts/0001", "attempts", "."])
def test_fence_is_made_in_directories_that_their_owner_has_closed(closed: str, mode: int) -> None:
    """The service is no root, and its jobs run as its own user."""
    with open_directory() as root:
        root.chmod(0o777)
        paths = JobPaths(root / "job-000000000001").attempt(1)
        os.seteuid(UID)
        try:
            paths.root.mkdir(parents=True)
            paths.lock_file.touch(mode)
            (paths.root.parent.parent / closed).chmod(mode)
            attempt_files.fence(paths)
            assert paths.fence_file.exists() and not attempt_files.lock_is_held(paths.lock_file)
        finally:
            os.seteuid(0)


def test_launch_file_survives_loss_of_power(tmp_path: Path) -> None:
    """With all directories above it, of which the submission has created the job's without a sync."""
    (tmp_path / "disk").mkdir()
    recorder = Recorder(tmp_path / "disk")
    home, job_id = HomePaths(recorder.root), "job-000000000001"
    paths = home.job(job_id).attempt(1)
    spec = JobSpec.model_validate({"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 1}})
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable)
    launch = build_launch_file(home, job_id, 1, spec, resolved, (), "token", Desired.RUN)
    with recorder.recording():
        ensure_dir(home.jobs)
        home.job(job_id).root.mkdir()
        attempt_files.write_launch(paths, launch)
    for name in disk_states(recorder.ops, len(recorder.ops), tmp_path / "after"):
        found = HomePaths(tmp_path / "after").job(job_id).attempt(1).launch_file
        assert found.read_bytes() == paths.launch_file.read_bytes(), name
        shutil.rmtree(tmp_path / "after")
