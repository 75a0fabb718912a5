"""A PowerSGD job of two nodes on a real Slurm, through the real service, ends with the bits of a local run, whatever Slurm does
to it: an administrator requeues it, its time is over, somebody cancels it, a node is lost.

Each happens while the ranks wait before a step, so that it costs little and always hits the same one. All four with
``RATCHET_TEST_STRIKES=all`` (``make exactness``), else the loss of a node, which no other test has with real ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import AttemptPaths
from ratchet_store.read.compare import Comparison, compare, render
from tests.e2e.exactness import final_checkpoint, run_undisturbed
from tests.support import file_writing_task, gated_task
from tests.support.engine_services import on_slurm
from tests.support.exact_cells import ON_ENGINES, Cell
from tests.support.file_writing_task import fetch_note_files
from tests.support.launch import wait_freeze
from tests.support.server import Server, wait_for
from tests.support.slurm import Slurm, missing_reason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # its fixture waits for a limit of a minute and for a lost node
    pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason())),
]

STRIKES = {"requeue": "sigterm", "time-limit": "time-limit", "cancel": "sigterm", "node-lost": "node-lost"}
"""What happens, and the cause that it is."""
CHOSEN = list(STRIKES) if os.environ.get("RATCHET_TEST_STRIKES") == "all" else ["node-lost"]
GATES = (12, 33, 53, 73)[: len(CHOSEN)]
TOPOLOGY = {"/facts/nodes", "/facts/ranks_per_node"}


@dataclass
class Run:
    """What became of the disturbed job; ``reasons``: why it said to wait while a node was missing."""

    attempts: list[dict[str, Any]]
    comparison: Comparison
    plan: dict[str, Any]
    jobs: list[str]
    reasons: set[str] = field(default_factory=set)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class Disturber:
    """Lets the job come to a gate, disturbs it there, and lets it stop."""

    server: Server
    cluster: Slurm
    gates: Path
    job_id: str
    last: int = 0

    def at(self, step: int, disturb: Callable[[str], object]) -> None:
        number, paths = self.server.wait_step(self.job_id, step - 1, after_attempt=self.last)
        self.last = number
        disturb(self.batch_job(number))
        self._stopping(paths)
        (self.gates / str(step)).unlink()

    def batch_job(self, attempt: int) -> str:
        name = f"{self.job_id}-a{attempt:04d}"
        return self.cluster.run("squeue", "-h", "--states=all", f"--name={name}", "-o", "%A").strip()

    def _stopping(self, paths: AttemptPaths) -> None:
        wait_freeze(paths, 0, deadline=100)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("slurm")
    gates, code = folder / "gates", folder / "code"
    gates.mkdir()
    code.mkdir()
    gated_task.write_task(code)
    file_writing_task.write_task(code, "gated", "Gated")
    spec = Cell(ON_ENGINES, "many", 2, "digits").spec("batch")
    arguments = {**spec["task"]["args"], "steps": GATES[-1] + 40, "gates": str(gates)}
    spec |= {"task": {"entrypoint": file_writing_task.ENTRYPOINT, "args": arguments}, "code": {"path": str(code)}}
    with on_slurm(folder, node_timeout=10) as (server, cluster):
        yield disturbed(server, cluster, gates, spec, run_undisturbed(server, spec))


def disturbed(server: Server, cluster: Slurm, gates: Path, spec: dict[str, Any], reference: Path) -> Run:
    for step in GATES:
        (gates / str(step)).touch()
    there = {
        "world": {**spec["world"], "nodes": 2, "ranks_per_node": 1},
        "launcher": {"kind": "slurm", "time_limit": "10m"},
        "policy": {**spec["policy"], "stop_grace": 20},
    }
    plan = server.call("POST", "/v1/jobs?dry_run=true", json={**spec, **there}, expect=200).json()
    job_id = server.submit({**spec, **there})
    disturber = Disturber(server, cluster, gates, job_id)

    def requeue(number: str) -> None:
        assert "disabled" in cluster.run("scontrol", "requeue", number, check=False)
        cluster.run("scontrol", "update", f"JobId={number}", "Requeue=1")
        cluster.run("scontrol", "requeue", number)

    strikes: dict[str, Callable[[str], object]] = {
        "requeue": requeue,
        "time-limit": lambda number: cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=1"),
        "cancel": lambda number: cluster.run("scancel", number),
        "node-lost": lambda number: cluster.kill_daemon("n2"),
    }
    for step, name in zip(GATES, CHOSEN, strict=True):
        disturber.at(step, strikes[name])

    def waits() -> str | None:
        job = server.job(job_id)
        return job["message"] if job["reason"] == "engine-queue" else None

    reasons = {wait_for(waits, "the job to wait for a node", 60)}
    cluster.start_node("n2")
    server.wait_phase(job_id, "SUCCEEDED", deadline=180)
    comparison = compare(reference, final_checkpoint(server, job_id))
    attempts = server.attempts(job_id)
    return Run(
        attempts,
        comparison,
        plan,
        [disturber.batch_job(a["number"]) for a in attempts],
        reasons,
        fetch_note_files(server, job_id),
    )


def test_slurm_run_has_same_bits_as_local_run(run: Run) -> None:
    assert run.comparison.tensors and not run.comparison.different, render(run.comparison)
    assert {state.pointer for state in run.comparison.states} == TOPOLOGY  # nothing else of what a rank remembers


def test_slurm_attempts_have_cause_and_lose_no_step(run: Run) -> None:
    causes = [attempt["cause"] for attempt in run.attempts]
    assert causes == [*(STRIKES[name] for name in CHOSEN), "completed"], run.attempts
    said = dict(zip(CHOSEN, (attempt["message"] for attempt in run.attempts), strict=False))
    words = {"requeue": "requeued", "cancel": "cancelled", "node-lost": "n[1-2]"}
    assert [(name, text) for name, text in said.items() if words.get(name, "") not in text] == []
    assert [attempt["steps_lost"] for attempt in run.attempts] == [0] * len(causes)
    assert [a["resume_report"]["verdict"] for a in run.attempts[1:]] == ["exact"] * len(CHOSEN)
    assert [a["base"]["step"] for a in run.attempts[1:]] == list(GATES)


def test_each_attempt_is_one_slurm_batch_job(run: Run) -> None:
    assert all(number.isdigit() for number in run.jobs) and len(set(run.jobs)) == len(CHOSEN) + 1


def test_files_of_all_nodes_are_collected(run: Run) -> None:
    assert run.notes == {"rank-0.txt": "0", "rank-1.txt": "1"}


def test_pending_slurm_job_is_named_as_reason_to_wait(run: Run) -> None:
    assert all("Slurm job" in reason for reason in run.reasons)


def test_dry_run_plan_has_the_slurm_batch_script(run: Run) -> None:
    script = run.plan["launch"]["request"]["script"]
    assert "#SBATCH --nodes=2" in script and "--no-requeue" in script and "ratchet_worker.agent" in script
