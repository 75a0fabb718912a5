"""The four forms of one script in docs/adoption.md: four ways to train the same net, each with a rank killed on the way.

Rung 0 goes on, but into other weights than without the kill; rung 1, under plain torchrun, ends in the weights of the undisturbed
rung 0; rungs 2 and 3 end in the checkpoint of an undisturbed run, the same one for both.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.resources.spec_file import read_spec
from ratchet_store.read.compare import compare
from tests.e2e.exactness import final_checkpoint
from tests.support.cli import Cli
from tests.support.full_matrix import full
from tests.support.server import Server, rank_pid, wait_for
from tests.support.torchrun import Torchrun

LADDER = Path(__file__).parents[2] / "examples" / "adoption"
EPOCHS, STEPS_PER_EPOCH = 6, 22
KILL_IN_EPOCH = 3
TOLD = f"epoch {KILL_IN_EPOCH - 1}:"
ARGUMENTS = ["--epochs", str(EPOCHS), "--lr", "0.1"]

pytestmark = pytest.mark.slow


def weights(text: str) -> str:
    """The digest that the script prints in the end, once."""
    (found,) = re.findall(r"weights ([0-9a-f]{16})", text)
    return str(found)


def torchrun(rung: str, directory: Path) -> Torchrun:
    return Torchrun([str(LADDER / rung / "train.py"), *ARGUMENTS], directory)


def kill_rank_1(ranks: Torchrun) -> None:
    """Within an epoch: after the save of the one before it, which rank 0 tells."""
    wait_for(lambda: TOLD in ranks.output.read_text(), f"{TOLD} in {ranks.output}", 150, 0.005)
    ranks.kill(1)


def submit(server: Server, rung: str, name: str) -> str:
    spec: dict[str, Any] = read_spec(str(LADDER / rung / "train.yaml"))
    spec |= {"name": name, "resources": {"cpus_per_rank": 1}, "policy": {"backoff": 0.1}}
    spec["world"]["device"] = "cpu"
    if "script" in spec:
        spec["script"] = ["train.py", *ARGUMENTS]
    else:
        spec["task"]["args"]["epochs"] = EPOCHS
    return server.submit(spec)


def live(server: Server, rung: str, kill: bool) -> str:
    """A whole life of a job; with ``kill``, rank 1 is killed between two checkpoints. Returns its id.

    A plain script on gloo may hang in torch behind its last line: the destructor of DDP's reducer holds the GIL while it waits
    for gloo's thread, which wants the GIL to drop the last collective of a backward. It is a race that a loaded machine loses in
    one of some twenty-five runs. Such a job has told its result; it is started again."""
    for _ in range(5):
        job_id = _live(server, rung, kill)
        if rung != "0_torchrun" or _ended(server, job_id):
            break
        server.call("POST", f"/v1/jobs/{job_id}/cancel", expect=202)
    server.wait_phase(job_id, "SUCCEEDED", deadline=180)
    return job_id


def _ended(server: Server, job_id: str) -> bool:
    """Does the job end, within a while behind what its script tells last?"""
    paths = server.paths.job(job_id)

    def told() -> bool:
        logs = paths.root.glob("attempts/*/logs/rank-00000.log")
        return any("test accuracy" in log.read_text() for log in logs)

    wait_for(lambda: told() or server.job(job_id)["phase"] == "FAILED", "the script's result", 180)
    with suppress(AssertionError):
        server.wait_phase(job_id, "SUCCEEDED", deadline=45)
        return True
    return server.job(job_id)["phase"] != "RUNNING"


def _live(server: Server, rung: str, kill: bool) -> str:
    job_id = submit(server, rung, f"rung-{rung[0]}-{'killed' if kill else 'undisturbed'}")
    paths = server.paths.job(job_id).attempt(1)
    if kill and rung == "0_torchrun":
        log = paths.log(0)
        wait_for(lambda: log.exists() and TOLD in log.read_text(), f"{TOLD} in {log}", 150, 0.005)
        os.kill(rank_pid(paths, 1), signal.SIGKILL)
    elif kill:
        server.wait_step(job_id, STEPS_PER_EPOCH * (KILL_IN_EPOCH - 1) + 5, deadline=150)
        os.kill(rank_pid(paths, 1), signal.SIGKILL)
    return job_id


@dataclass(frozen=True)
class PlainLives:
    """What is left of rungs 0 and 1: ids of the script's jobs, and what rung 1 printed under torchrun."""

    script_undisturbed: str
    script: str
    hooks: str


@dataclass(frozen=True)
class Lives:
    """The ids of the jobs of rungs 2 and 3."""

    session_undisturbed: str
    session: str
    task: str


@pytest.fixture(scope="module")
def plain_lives(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainLives]:
    ranks = torchrun("1_hooks", tmp_path_factory.mktemp("torchrun"))
    try:
        with ThreadPoolExecutor(3) as threads:
            hooks = threads.submit(kill_rank_1, ranks)
            ids = threads.map(lambda kill: live(server, "0_torchrun", kill), (False, True))
            hooks.result()
        yield PlainLives(*ids, hooks=ranks.wait())
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def lives(server: Server) -> Lives:
    """All at once: most of their time is the import of torch."""
    jobs = [("2_session", False), ("2_session", True), ("3_task", True)]
    with ThreadPoolExecutor(len(jobs)) as threads:
        return Lives(*threads.map(lambda job: live(server, *job), jobs))


def told_by(server: Server, job_id: str, attempt: int) -> str:
    return server.paths.job(job_id).attempt(attempt).log(0).read_text()


@full
def test_rung_0_is_restarted_but_ends_in_different_weights(server: Server, plain_lives: PlainLives) -> None:
    first, second = server.attempts(plain_lives.script)
    assert first["cause"] == "rank-killed" and second["outcome"] == "succeeded"
    assert second["resume_report"]["verdict"] == "unmanaged"
    said = told_by(server, plain_lives.script, 2)
    assert "epoch 1:" not in said and f"epoch {EPOCHS}:" in said, "it went on from its own checkpoint"
    assert (server.paths.job(plain_lives.script).work_dir / "checkpoint.pt").is_file()
    assert weights(said) != weights(told_by(server, plain_lives.script_undisturbed, 1))


@full
def test_rung_1_restarted_by_torchrun_ends_in_weights_of_rung_0(server: Server, plain_lives: PlainLives) -> None:
    assert plain_lives.hooks.count("epoch 1:") == 1 and "exitcode: -9" in plain_lives.hooks, (
        "killed, and went on from its own files"
    )
    assert weights(plain_lives.hooks) == weights(told_by(server, plain_lives.script_undisturbed, 1))


@pytest.mark.parametrize("rung", ["session", "task"])
def test_rungs_2_and_3_resume_exactly_to_the_same_checkpoint(server: Server, lives: Lives, rung: str) -> None:
    job_id = getattr(lives, rung)
    first, second = server.attempts(job_id)
    assert first["cause"] == "rank-killed" and first["last_step"] < STEPS_PER_EPOCH * EPOCHS
    assert second["resume_report"]["verdict"] == "exact", second["resume_report"]
    assert second["base"]["step"] > 10, "PowerSGD compressed already"
    comparison = compare(final_checkpoint(server, lives.session_undisturbed), final_checkpoint(server, job_id))
    assert comparison.tensors and comparison.identical, f"{comparison.different} {comparison.states}"


def test_init_from_torchrun_command_writes_a_valid_spec(server: Server, tmp_path: Path) -> None:
    shutil.copy(LADDER / "0_torchrun" / "train.py", tmp_path)
    cli = Cli(server.home, tmp_path)
    first = cli("init", "torchrun", "--nproc-per-node", "2", "train.py", "--epochs", "10", "--lr", "0.1")
    assert first.text == "" and "wrote train.yaml" in first.errors
    assert first.errors.splitlines()[-1] == "next: ratchet submit train.yaml --follow"
    assert "warning: powerSGD_hook is registered in train.py" in first.errors and "unmanaged" in first.errors
    plan = cli("submit", "train.yaml", "--dry-run", "--json").data
    assert plan["resolved"]["device"] in ("cpu", "cuda")

    written = (tmp_path / "train.yaml").read_text()
    again = cli("init", "train.py", expect=5)
    assert "train.yaml already exists: --force" in again.errors and (tmp_path / "train.yaml").read_text() == written
