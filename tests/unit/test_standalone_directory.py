"""The directory of a run without a service: one process at a time, numbered starts, what is kept over them; and its arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract import code_tree
from ratchet_contract.errors import UserError
from ratchet_contract.messages import Metrics
from ratchet_contract.resume import Base, Segment
from ratchet_contract.spec import Resolved
from ratchet_contract.spec_checkpoint import CheckpointSpec
from ratchet_contract.spec_parse import parse_spec
from ratchet_worker.session_arguments import SessionArguments
from ratchet_worker.spool import Spool
from ratchet_worker.standalone_directory import StandaloneDirectory
from tests.support.checkpoints import make_checkpoint, names

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
    launch = directory.begin(FACTS)
    assert directory.tidy(CheckpointSpec.model_validate(spec)) == []
    paths = directory.paths.attempt(launch.epoch)
    paths.base_file.write_text(base.model_dump_json())
    spool = Spool(paths.spool(0))
    for step, value in (logged or {}).items():
        spool.append(Metrics(rank=0, at="2026-01-01T00:00:00Z", step=step, values={"loss": value}))
    spool.close()
    return launch.lineage


def test_each_start_is_an_attempt_and_what_is_kept_holds_over_all_of_them(root: Path) -> None:
    directory = StandaloneDirectory(root)
    keep = {"keep_last": 2, "keep_best": {"metric": "loss"}}
    assert _begin(directory, Base(), logged={10: 0.5, 20: 0.1, 30: 0.7}, **keep) == []
    base = Base()
    for step in (10, 20, 30):
        base = make_checkpoint(directory.paths.checkpoints, step, 1, parent=base, job_id=directory.id).base
    make_checkpoint(directory.paths.checkpoints, 25, 1, job_id="job-2")
    (directory.paths.checkpoints / "step-000000000025.a0001").rename(directory.paths.checkpoints / "step-000000000025")
    (directory.paths.checkpoints / "notes.txt").write_text("mine")
    half = directory.paths.checkpoint(35, 1)
    half.mkdir()

    assert _begin(directory, base, **keep) == [Segment(epoch=1, after_step=0)]
    assert not half.exists()
    kept = base
    for step in (40, 50):
        base = make_checkpoint(directory.paths.checkpoints, step, 2, parent=base, job_id=directory.id).base
    again = directory.begin(FACTS)

    assert (again.epoch, directory.tidy(CheckpointSpec.model_validate(keep))) == (3, [])
    assert again.lineage == [Segment(epoch=2, after_step=30), Segment(epoch=1, after_step=0, until_step=kept.step)]
    assert names(directory.paths.checkpoints) == [
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


HOLDER = """
import os, signal, sys
from pathlib import Path
from ratchet_worker.standalone_directory import StandaloneDirectory
held = StandaloneDirectory(Path(sys.argv[1]))
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b".")
    signal.pause()
os.read(reader, 1)
print("a worker runs", flush=True)
signal.pause()
"""


def test_a_directory_is_held_until_its_process_is_dead_and_not_by_workers_that_it_has_forked(root: Path) -> None:
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
def test_a_directory_of_something_else_is_refused_and_left_as_it_is(root: Path, mark: str | None) -> None:
    (root / "checkpoints").mkdir(parents=True)
    if mark is not None:
        (root / "ratchet-run.json").write_text(mark)
    for _ in range(2):  # the lock is given back
        with pytest.raises(UserError) as refused:
            StandaloneDirectory(root)
        assert refused.value.code == "directory-of-others"
    assert names(root) == ["agent.lock", "checkpoints", *(["ratchet-run.json"] if mark is not None else [])]


def test_a_snapshot_of_the_code_beside_it_leaves_it_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    directory = StandaloneDirectory(tmp_path / "my-run")
    make_checkpoint(directory.paths.checkpoints, 10, 1, job_id=directory.id)
    directory.close()
    assert [entry.path for entry in code_tree.entries(tmp_path)] == ["train.py"]


def test_arguments_are_keys_of_the_spec_and_what_a_job_has_otherwise_is_named() -> None:
    given = {
        "hook": "powerSGD",
        "seed": 3,
        "checkpoint": {"every_steps": 7},
        "ddp": {"bucket_cap_mb": 1.0},
        "on_hook_mismatch": "reset",
    }
    spec = SessionArguments(given=given).spec({**DATA, "checkpoint": {"keep_last": 9}})
    assert (spec.hook.name, spec.seed, spec.policy.on_hook_mismatch) == ("powerSGD", 3, "reset")
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep_last) == (7, 9)

    assert SessionArguments().differences(spec) == SessionArguments(given=given).differences(spec) == []
    other = {
        "hook": "allreduce",
        "seed": 4,
        "checkpoint": {"every_steps": 7, "keep_last": 2},
        "on_hook_mismatch": "fail",
    }
    assert SessionArguments(given=other).differences(spec) == [
        "hook (allreduce in the script, powerSGD in the job's spec)",
        "seed (4 in the script, 3 in the job's spec)",
        "checkpoint.keep_last (2 in the script, 9 in the job's spec)",
        'policy.on_hook_mismatch ("fail" in the script, "reset" in the job\'s spec)',
    ]
    parameter = {"hook": {"name": "powerSGD", "matrix_approximation_rank": 4}}
    (one,) = SessionArguments(given=parameter).differences(spec)
    assert one.startswith("hook.matrix_approximation_rank (4 in the script, ")
    for wrong in ({"checkpoint": {"every_step": 5}}, {"determinism": "very"}, {"seed": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))) as refused:
            SessionArguments(given=wrong).spec(DATA)
        assert refused.value.code == "session-arguments"


def test_checkpoints_whose_attempts_are_gone_are_no_start_from_scratch(root: Path) -> None:
    directory = StandaloneDirectory(root)
    make_checkpoint(directory.paths.checkpoints, 10, 4, job_id=directory.id)
    with pytest.raises(UserError, match="does not tell which starts made them"):
        directory.begin(FACTS)
    directory.close()
