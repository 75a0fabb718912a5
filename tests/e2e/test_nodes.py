"""Two nodes with a rank each end with the bits of one node with two ranks, whatever happens to one of them: through the real
service, by a launcher that another package brings. First as two agents side by side; then, where network namespaces can be made,
each on a host of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.processes import procfs
from ratchet_store.read.compare import Comparison, compare, render
from ratchet_worker.ipc.progress_counter import CounterReader
from tests.e2e.exactness import final_checkpoint, run_undisturbed
from tests.support import two_node_launcher
from tests.support.exact_cells import ON_ENGINES, Cell
from tests.support.fork_server import Interpreter
from tests.support.server import Server, agent_pid, rank_pid, wait_for

CODE = Path(__file__).parents[1] / "support" / "exact_job"
SPEC = {**Cell(ON_ENGINES, "many", 2, "digits").spec("nodes"), "code": {"path": str(CODE)}}
TOPOLOGY = {"/facts/nodes", "/facts/ranks_per_node"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Run:
    """What became of the disturbed job; ``agent_logs``: of its second attempt; ``stacks``: the ranks' logs of the third, which
    hung; ``no_hosts``: why its nodes had no hosts of their own."""

    attempts: list[dict[str, Any]]
    comparison: Comparison
    agent_logs: list[str]
    stacks: list[str]
    hosts: two_node_launcher.Hosts | None
    no_hosts: str = ""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("nodes")
    hosts, why = None, ""
    try:
        hosts = two_node_launcher.Hosts()
    except two_node_launcher.NoNamespaces as error:
        why = str(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", two_node_launcher.environment_with_plugin()["PYTHONPATH"])
        services, agents = (
            Interpreter(kind, own=True) for kind in ("service", "ranks")
        )  # they see the launcher's package
        launchers = ("--launchers", str(two_node_launcher.launchers_file(folder / "side-by-side.yaml")))
        server = Server(folder / "home", *launchers, agents=agents, services=services)
        try:
            reference = run_undisturbed(server.start(), SPEC)
            yield disturbed(server, folder, reference, hosts, why)
        finally:
            server.stop()
            services.close()
            agents.close()
            if hosts is not None:
                hosts.close()


def disturbed(server: Server, folder: Path, reference: Path, hosts: two_node_launcher.Hosts | None, why: str) -> Run:
    job_id = server.submit(two_node_launcher.spec({**SPEC, "policy": {**SPEC["policy"], "step_deadline": 5.0}}))
    number, paths = server.wait_step(job_id, 12, saved=True)
    server.kill()  # it comes back elsewhere
    os.kill(agent_pid(paths), signal.SIGKILL)  # of node 0: rank 0 goes with it, and the store that all ranks meet in
    if hosts is not None:
        behind = [hosts.command(node) for node in (0, 1)]
        file = two_node_launcher.launchers_file(folder / "hosts.yaml", behind, code=str(folder / "own"))
        server.options = (
            "--cpu-slots",
            "8",
            "--launchers",
            str(file),
            "--host",
            hosts.local_address,
            "--insecure-http",
        )
        server.use_admin_token()
    server.start()
    number, paths = server.wait_step(job_id, 30, after_attempt=number, saved=True)
    os.kill(agent_pid(paths.node(1)), signal.SIGTERM)
    number, paths = server.wait_step(job_id, 45, after_attempt=number, saved=True)
    stop_within_a_step(paths, 1)
    server.wait_phase(job_id, "SUCCEEDED", deadline=180)
    second = server.paths.job(job_id).attempt(2)
    logs = [second.node(node).agent_log.read_text() for node in (0, 1)]
    stacks = [server.paths.job(job_id).attempt(3).log(rank).read_text() for rank in (0, 1)]
    comparison = compare(reference, final_checkpoint(server, job_id))
    return Run(server.attempts(job_id), comparison, logs, stacks, hosts, why)


def stop_within_a_step(paths: AttemptPaths, rank: int) -> None:
    """By SIGSTOP. Its counter tells where it stands then: at a boundary it is let go again."""
    pid, counter = rank_pid(paths, rank), CounterReader(paths.counter(rank))

    def stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: procfs.stat(pid).state == "T", f"rank {rank} to stop", 10)
        reading = counter.read()
        if reading is not None and reading.started > reading.finished:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    wait_for(stopped, f"rank {rank} to be stopped within a step", 20)


def test_two_node_run_has_same_bits_as_one_node(run: Run) -> None:
    assert run.comparison.tensors and not run.comparison.different, render(run.comparison)
    assert {state.pointer for state in run.comparison.states} == TOPOLOGY  # nothing else of what a rank remembers


def test_attempts_have_the_cause_from_the_originating_node(run: Run) -> None:
    assert [a["cause"] for a in run.attempts] == ["unknown", "sigterm", "hang", "completed"], run.attempts
    assert "node 0" in run.attempts[0]["message"], run.attempts[0]
    hang = run.attempts[2]["message"]
    assert "rank 1" in hang and "SIGSTOP" in hang, hang
    assert "in train_step" in run.stacks[1].partition("writes the stacks of its threads")[2], run.stacks
    assert "in train_step" in run.stacks[0], (
        run.stacks
    )  # or its traceback, where its connection broke before it was asked
    assert run.attempts[1]["steps_lost"] == 0
    assert [a["resume_report"]["verdict"] for a in run.attempts[1:]] == ["exact"] * 3


def test_hosts_fetch_missing_code_and_connect_over_their_interface(run: Run) -> None:
    if run.hosts is None:
        pytest.skip(f"needs network namespaces: {run.no_hosts}")
    assert "fetched" in "".join(run.agent_logs)  # by one of them or by both: here they share the place
    for node, log in enumerate(run.agent_logs):
        assert f"node {node} is at {run.hosts.address(node)}:" in log and f"({run.hosts.interface})" in log, log
