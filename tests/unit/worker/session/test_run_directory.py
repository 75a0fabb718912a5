"""The directory of a run without a service: one process at a time, numbered starts, what is kept over them; and its arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.code import tree
from ratchet_contract.errors import UserError
from ratchet_contract.protocol.messages import Metrics
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_worker.ipc.report_spool import Spool
from ratchet_worker.session.arguments import SessionArguments
from ratchet_worker.session.run_directory import StandaloneDirectory
from tests.support.checkpoints import list_names, make_checkpoint

DATA: dict[str, Any] = {"name": "standalone", "script": ["train.py"], "code": {"path": "."}}
FACTS = {
    "world_size": 1,
    "ranks": [0],
    "spec": parse_spec(DATA),
    "resolved": Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable),
    "workdir": "/",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def _begin(
    directory: StandaloneDirectory, base: Base, *, logged: dict[int, float] | None = None, **spec: Any
) -> list[Segment]:
    """One start, up to the point where it trains; returns its lineage."""
    launch = directory.begin_attempt(FACTS)
    assert directory.delete_surplus(CheckpointSpec.model_validate(spec)) == []
    paths = directory.paths.attempt(launch.attempt)
    paths.base_file.write_text(base.model_dump_json())
    spool = Spool(paths.spool(0))
    for step, value in (logged or {}).items():
        spool.append(Metrics(rank=0, at="2026-01-01T00:00:00Z", step=step, values={"loss": value}))
    spool.close()
    return launch.lineage


def test_contradictory_records_of_starts_are_refused_with_advice(root: Path) -> None:
    directory = StandaloneDirectory(root)
    _begin(directory, Base())
    _begin(directory, Base(step=5, attempt=3))
    with pytest.raises(
        UserError, match=r"attempt 2 records that it started from attempt 3.*another directory"
    ) as caught:
        directory.begin_attempt(FACTS)
    assert caught.value.code == "directory-of-others"
    directory.close()
    (root / "ratchet-run.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="has no id"):
        StandaloneDirectory(root)


def test_run_directory_numbers_starts_as_attempts_and_applies_retention(root: Path) -> None:
    directory = StandaloneDirectory(root)
    keep = {"keep_last": 2, "keep_best": {"metric": "loss"}}
    assert _begin(directory, Base(), logged={10: 0.5, 20: 0.1, 30: 0.7}, **keep) == []
    base = Base()
    for step in (10, 20, 30):
        base = make_checkpoint(directory.paths.checkpoints, step, 1, parent=base, job_id=directory.id).base
    make_checkpoint(directory.paths.checkpoints, 25, 1, job_id="job-2")
    (directory.paths.checkpoints / "step-000000000025.a0001").rename(directory.paths.checkpoints / "step-000000000025")
    (directory.paths.checkpoints / "notes.txt").write_text("mine")
    with directory.paths.attempt(1).spool(0).open("ab") as spool:  # as a power loss leaves them
        spool.write(b'{"kind":"metrics","rank":0,\0\0\0\n' + b'{"kind":"metrics","rank":0}\n')
    half = directory.paths.checkpoint(35, 1)
    half.mkdir()

    assert _begin(directory, base, **keep) == [Segment(attempt=1, after_step=0)]
    assert not half.exists()
    kept = base
    for step in (40, 50):
        base = make_checkpoint(directory.paths.checkpoints, step, 2, parent=base, job_id=directory.id).base
    again = directory.begin_attempt(FACTS)

    assert (again.attempt, directory.delete_surplus(CheckpointSpec.model_validate(keep))) == (3, [])
    assert again.lineage == [Segment(attempt=2, after_step=30), Segment(attempt=1, after_step=0, until_step=kept.step)]
    assert list_names(directory.paths.checkpoints) == [
        "notes.txt",
        "step-000000000020.a0001",  # the best
        "step-000000000025",
        "step-000000000040.a0002",
        "step-000000000050.a0002",
    ]
    directory.close()
    same = StandaloneDirectory(root)
    assert same.id == directory.id
    same.close()


def test_surplus_that_the_system_does_not_delete_is_named(root: Path) -> None:
    directory = StandaloneDirectory(root)
    _begin(directory, Base())
    made = make_checkpoint(directory.paths.checkpoints, 10, 1, job_id=directory.id)
    (directory.paths.checkpoints / made.id / "left.tmp").mkdir()  # which is not removed as a file
    directory.begin_attempt(FACTS)
    (note,) = directory.delete_surplus(CheckpointSpec())
    assert note.startswith("surplus checkpoints are not deleted: ") and "left.tmp" in note
    directory.close()


HOLDER = """
import os, signal, sys
from pathlib import Path
from ratchet_worker.session.run_directory import StandaloneDirectory
held = StandaloneDirectory(Path(sys.argv[1]))
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b".")
    signal.pause()
os.read(reader, 1)
print("a worker runs", flush=True)
signal.pause()
"""


def test_run_directory_lock_ends_with_process_despite_forked_workers(root: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert holder.stdout is not None
    with holder, holder.stdout:
        try:
            assert holder.stdout.readline() == "a worker runs\n"
            with pytest.raises(UserError, match="another process trains") as refused:
                StandaloneDirectory(root)
            assert refused.value.code == "directory-in-use"
            holder.kill()
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its group's number stays its own
            StandaloneDirectory(root).close()
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


@pytest.mark.parametrize("mark", [None, "{}", "no json", '{"id": "../x"}', "[]"])
def test_foreign_run_directory_is_refused_unchanged(root: Path, mark: str | None) -> None:
    (root / "checkpoints").mkdir(parents=True)
    if mark is not None:
        (root / "ratchet-run.json").write_text(mark)
    for _ in range(2):  # the lock is given back
        with pytest.raises(UserError) as refused:
            StandaloneDirectory(root)
        assert refused.value.code == "directory-of-others"
    assert list_names(root) == ["agent.lock", "checkpoints", *(["ratchet-run.json"] if mark is not None else [])]


def test_code_snapshot_leaves_out_run_directory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    directory = StandaloneDirectory(tmp_path / "my-run")
    make_checkpoint(directory.paths.checkpoints, 10, 1, job_id=directory.id)
    directory.close()
    assert [entry.path for entry in tree.list_entries(tmp_path)] == ["train.py"]


def test_session_arguments_are_validated_as_spec_keys() -> None:
    given = {
        "hook": "powerSGD",
        "seed": 3,
        "checkpoint": {"every_steps": 7},
        "ddp": {"bucket_cap_mb": 1.0},
        "on_hook_mismatch": "reset",
    }
    spec = SessionArguments(specified=given).spec({**DATA, "checkpoint": {"keep_last": 9}})
    assert (spec.hook.name, spec.seed, spec.policy.on_hook_mismatch) == ("powerSGD", 3, "reset")
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep_last) == (7, 9)

    assert SessionArguments().differences(spec) == SessionArguments(specified=given).differences(spec) == []
    other = {
        "hook": "allreduce",
        "seed": 4,
        "checkpoint": {"every_steps": 7, "keep_last": 2},
        "on_hook_mismatch": "fail",
    }
    assert SessionArguments(specified=other).differences(spec) == [
        "hook (allreduce in the script, powerSGD in the job's spec)",
        "seed (4 in the script, 3 in the job's spec)",
        "checkpoint.keep_last (2 in the script, 9 in the job's spec)",
        'policy.on_hook_mismatch ("fail" in the script, "reset" in the job\'s spec)',
    ]
    parameter = {"hook": {"name": "powerSGD", "matrix_approximation_rank": 4}}
    (one,) = SessionArguments(specified=parameter).differences(spec)
    assert one.startswith("hook.matrix_approximation_rank (4 in the script, ")
    for wrong in ({"checkpoint": {"every_step": 5}}, {"determinism": "very"}, {"seed": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))) as refused:
            SessionArguments(specified=wrong).spec(DATA)
        assert refused.value.code == "session-arguments"


def test_run_directory_with_checkpoints_but_no_attempts_is_refused(root: Path) -> None:
    directory = StandaloneDirectory(root)
    make_checkpoint(directory.paths.checkpoints, 10, 4, job_id=directory.id)
    with pytest.raises(UserError, match="does not record which starts made them"):
        directory.begin_attempt(FACTS)
    directory.close()
