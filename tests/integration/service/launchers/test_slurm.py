"""The Slurm launcher on a real slurmctld with two nodes.

The agent is a stand-in that has no ranks (``tests.support.fake_slurm_agent``): what is looked at here is who starts it, what it
is given, which signals reach it, and what is known of its end.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.launchers.base import AttemptRef, EngineUnreachable, LaunchError
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.slurm.batch_script import job_comment
from ratchet_service.launchers.slurm.commands import Commands
from ratchet_service.launchers.slurm.launcher import SlurmLauncher
from ratchet_service.launchers.slurm.settings import Settings
from ratchet_service.launchers.slurm.squeue import Queue
from tests.support import fake_slurm_agent
from tests.support.server import processes_below, wait_for
from tests.support.slurm import Slurm, missing_reason, slurm_cluster

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

PATIENCE = 150.0  # a message to a node that stands still is sent again after up to 60 s (tests.support.slurm)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm_cluster() as running:
        yield running


@dataclass
class Site:
    """A run directory on the cluster's file system, and its launchers."""

    cluster: Slurm
    home: HomePaths
    python: Path
    started: list[AttemptRef]
    key: str = field(default_factory=lambda: secrets.token_hex(5))  # Slurm remembers the jobs of other tests

    def launcher(self, *, period: float = 0.1, defaults: dict[str, Any] | None = None, **environ: str) -> SlurmLauncher:
        settings = Settings.model_validate(
            {"python": str(self.python), "poll_seconds": period, "file_seconds": 0.5, "defaults": defaults or {}}
        )
        variables = {"PATH": os.environ["PATH"], **self.cluster.variables, **environ}
        return SlurmLauncher(self.home, settings, variables)

    def launch(self, job: str = "1", attempt: int = 1, nodes: int = 2, **more: Any) -> LaunchFile:
        job = f"job-{self.key}{job:>02}"
        act = more.pop("act", {})
        own = {"kind": "slurm", **more.pop("launcher", {})}
        spec = JobSpec.model_validate(
            {
                "name": "a",
                "task": {"entrypoint": "m:T"},
                "world": {"nodes": nodes},
                "launcher": own,
                "env": {"ACT": json.dumps(act)},
                "policy": {"stop_grace": 5},
                **more,
            }
        )
        resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable)
        launch = build_launch_file(self.home, job, attempt, spec, resolved, (), "secret-token", Desired.RUN)
        self.started.append(AttemptRef(job, attempt, self.home.job(job).attempt(attempt), nodes))
        return launch

    def begin(self, made: SlurmLauncher, *args: Any, **more: Any) -> AttemptRef:
        """Submit a launch and wait until all its agents are there."""
        plan = made.plan(self.launch(*args, **more))
        made.submit(plan)
        wait_for(lambda: all(node.seen for node in made.poll(plan.ref).nodes), "the agents to begin", PATIENCE)
        return plan.ref

    def number(self, ref: AttemptRef) -> str:
        """Of the one batch job that Slurm has of the attempt."""
        (number,) = self.cluster.run("squeue", "-h", "--states=all", f"--name={ref.name}", "-o", "%A").split()
        return number


@pytest.fixture
def site(cluster: Slurm, tmp_path: Path) -> Iterator[Site]:
    with site_on(cluster, tmp_path) as made:
        yield made


@contextmanager
def site_on(cluster: Slurm, tmp_path: Path) -> Iterator[Site]:
    """A site whose jobs end with the block."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_slurm_agent.__file__} "$@"\n')
    python.chmod(0o755)
    made = Site(cluster, HomePaths(tmp_path / "home"), python, [])
    yield made
    launcher = made.launcher()

    def ended() -> bool:
        return not [left for ref in made.started for left in launcher.kill(ref)]

    wait_for(ended, "the test's jobs to end", PATIENCE)
    cluster.resume_drained()


def over(made: SlurmLauncher, ref: AttemptRef, deadline: float = PATIENCE) -> None:
    wait_for(lambda: not made.poll(ref).alive, "the attempt to be over", deadline)


def test_slurm_starts_one_agent_per_node_with_secrets_and_stops_them(site: Site) -> None:
    made = site.launcher(
        SOURCE="the-value",
        OTHER="kept",
        RATCHET_DATABASE_URL="postgresql://u:pw@h/d",
        PGPASSWORD="pw",
        SBATCH_PARTITION="nowhere",
        SBATCH_REQUEUE="1",
        SLURM_JOB_ID="7",
    )
    ref = site.begin(made, secrets={"KEY": {"from_env": "SOURCE"}}, resources={"cpus_per_rank": 2, "memory": "64Mi"})
    wait_for(lambda: made.poll(ref).waiting is None, "the queue to tell of the start, as the agents have", PATIENCE)
    state = made.poll(ref)
    assert state.alive and state.waiting is None and not state.ends
    assert [node.agent.host for node in state.nodes if node.agent] == ["host-0", "host-1"]
    for node in range(2):
        paths = ref.paths.node(node)
        env = json.loads((paths.root / "env.json").read_text())
        assert (env["KEY"], env["OTHER"], env["SLURM_PROCID"]) == ("the-value", "kept", str(node))
        assert env["RATCHET_ATTEMPT_DIR"] == str(ref.paths.root) and env["SLURM_JOB_ID"] != "7"
        assert not {"RATCHET_DATABASE_URL", "PGPASSWORD", "SBATCH_PARTITION"} & set(env)
        assert paths.agent_log.read_text() == "began\n"
    number = site.number(ref)
    shown = site.cluster.run("scontrol", "show", "job", "-dd", number) + site.cluster.run(
        "scontrol", "write", "batch_script", number, "-"
    )
    assert "the-value" not in shown and "secret-token" not in shown
    assert "Requeue=0" in shown and "CPUs/Task=1" in shown and "MinMemoryNode=64M" in shown
    made.stop(ref, 5)
    over(made, ref)
    state = made.poll(ref)
    assert [result.cause for result in state.results] == [Cause.SIGTERM] * 2
    assert state.ends == () and made.kill(ref) == []
    assert "began" in made.logs(ref, 1000)


def test_slurm_job_does_not_start_on_an_excluded_node(site: Site) -> None:
    for number, (away, free) in enumerate((("n1", "n2"), ("n2", "n1")), 2):
        made = site.launcher()
        plan = made.plan(site.launch(str(number), nodes=1).model_copy(update={"exclude_nodes": [away]}))
        made.submit(plan)
        wait_for(lambda made=made, plan=plan: made.poll(plan.ref).seen, "the agent to start", PATIENCE)
        shown = site.cluster.run("scontrol", "show", "job", site.number(plan.ref))
        assert f" NodeList={free}\n" in shown and f"ExcNodeList={away}" in shown


def test_slurm_second_submission_starts_nothing(site: Site) -> None:
    first = site.launcher()
    ref = site.begin(first)
    for again in (first, site.launcher()):
        again.submit(again.plan(site.launch()))
    first.stop(ref, 5)
    over(first, ref)
    for name in ("agent.json", "node-00001/agent.json"):  # even where nothing but Slurm knows of it
        (ref.paths.root / name).unlink()
    site.launcher().submit(site.launcher().plan(site.launch()))
    assert site.number(ref)


def test_slurm_job_without_free_nodes_waits_with_a_reason_and_can_be_stopped(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, launcher={"exclusive": True})
    plan = made.plan(site.launch("2", nodes=1))
    made.submit(plan)
    wait_for(lambda: "Resources" in (made.poll(plan.ref).waiting or ""), "the reason to wait", PATIENCE)
    state = made.poll(plan.ref)
    assert state.alive and not state.seen and site.number(plan.ref) in (state.waiting or "")
    held = site.launcher().plan(site.launch("3", nodes=1, launcher={"options": {"hold": None}}))
    made.submit(held)
    assert "held by its owner" in (made.poll(held.ref).waiting or "")
    made.stop(plan.ref, 5)
    over(made, plan.ref)
    assert [end.cause for end in made.poll(plan.ref).ends] == [Cause.SIGTERM]
    assert made.poll(ref).alive


def test_slurm_job_that_can_never_start_ends_with_launcher_error(site: Site) -> None:
    made = site.launcher(defaults={"partition": "short"})
    plan = made.plan(site.launch(launcher={"time_limit": 600}))
    made.submit(plan)
    wait_for(lambda: made.poll(plan.ref).ends, "Slurm to see it", PATIENCE)
    state = made.poll(plan.ref)
    assert state.alive and state.waiting is None
    assert state.ends[0].cause is Cause.LAUNCHER_ERROR and "will never start" in state.ends[0].message
    assert "will never start" in (state.nodes[1].note or "")
    assert made.kill(plan.ref) == [f"Slurm job {site.number(plan.ref)} (PENDING)"]
    wait_for(lambda: made.kill(plan.ref) == [], "it to end", PATIENCE)


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ({"partition": "nowhere"}, "Invalid partition"),
        ({"constraint": "gold"}, "Invalid feature"),
        ({"options": {"no-such-option": "1"}}, "no-such-option"),
    ],
)
def test_submit_refused_by_slurm_raises_launch_error_with_slurms_message(
    site: Site, launcher: dict[str, Any], words: str
) -> None:
    made = site.launcher()
    with pytest.raises(LaunchError, match=words):
        made.submit(made.plan(site.launch(launcher=launcher)))


def test_sbatch_option_values_are_escaped(site: Site, tmp_path: Path) -> None:
    mail = f"a#b \"c\" \\ 'd' $(touch {tmp_path}/evil) `touch {tmp_path}/evil`"
    made = site.launcher()
    setup = ["#SBATCH --job-name=other", "export FROM_SETUP='a b'"]
    ref = site.begin(made, launcher={"options": {"mail-user": mail, "mail-type": "TIME_LIMIT_90"}, "setup": setup})
    assert f"MailUser={mail} " in site.cluster.run("scontrol", "show", "job", "-o", site.number(ref)).replace("\n", " ")
    assert json.loads((ref.paths.root / "env.json").read_text())["FROM_SETUP"] == "a b"
    assert not (tmp_path / "evil").exists()


def test_failing_setup_command_ends_the_attempt_without_an_agent(site: Site) -> None:
    made = site.launcher()
    plan = made.plan(site.launch(launcher={"setup": ["echo loading; false"]}))
    made.submit(plan)
    over(made, plan.ref)
    state = made.poll(plan.ref)
    assert not state.seen and [end.cause for end in state.ends] == [Cause.LAUNCHER_ERROR]
    assert "loading" in made.logs(plan.ref, 1000)


def test_kill_ends_agents_that_ignore_signals_without_killwait(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, act={"0": "deaf", "1": "deaf"})
    made.stop(ref, 5)
    pids = [node.agent.pid for node in made.poll(ref).nodes if node.agent]
    began = time.monotonic()
    assert made.kill(ref) == [f"Slurm job {site.number(ref)} (RUNNING)"]
    wait_for(lambda: made.kill(ref) == [], "it to end", PATIENCE)
    assert time.monotonic() - began < 5, "it waited for KillWait"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not made.poll(ref).alive and made.poll(ref).results == ()


def test_dead_agent_of_one_node_is_reported_lost_while_others_run(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made)
    agent = made.poll(ref).nodes[1].agent
    assert agent is not None
    os.kill(agent.pid, signal.SIGKILL)
    wait_for(lambda: made.poll(ref).lost == (1,), "the launcher to know", PATIENCE)
    state = made.poll(ref)
    assert state.alive and not state.nodes[0].gone and "Killed" in (state.nodes[1].note or "")


def test_crash_of_one_agent_lets_the_other_agents_report_their_result(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, act={"0": "crash"})
    wait_for(lambda: made.poll(ref).lost == (0,), "the first agent's end", PATIENCE)
    site.cluster.run("scancel", "--signal=USR1", site.number(ref))  # what it hears first tells its cause
    over(made, ref)
    state = made.poll(ref)
    assert [(result.node, result.cause) for result in state.results] == [(1, Cause.TIME_LIMIT)]
    assert state.ends[0].message.endswith("exit code 143")


def test_scancel_by_a_user_lets_agents_report_cause_sigterm(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made)
    site.cluster.run("scancel", site.number(ref))
    over(made, ref)
    state = made.poll(ref)
    assert [result.cause for result in state.results] == [Cause.SIGTERM] * 2
    assert [end.cause for end in state.ends] == [Cause.SIGTERM] and "cancelled" in state.ends[0].message


def test_slurm_requeue_does_not_start_an_attempt_twice(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, act={"0": "deaf"})
    number = site.number(ref)
    assert "presently disabled" in site.cluster.run("scontrol", "requeue", number, check=False)
    site.cluster.run("scontrol", "update", f"JobId={number}", "Requeue=1")
    agents = [made.poll(ref).nodes[node].agent for node in range(2)]
    site.cluster.run("scontrol", "requeue", number)
    over(made, ref)
    assert [node.agent for node in made.poll(ref).nodes] == agents
    (end,) = made.poll(ref).ends
    assert end.cause is Cause.SIGTERM and "requeued" in end.message
    assert site.cluster.run("squeue", "-h", "--states=all", "-j", number, "-o", "%T") == "CANCELLED\n"
    assert [result.node for result in made.poll(ref).results] == [1]


def test_slurm_preemption_ends_with_cause_higher_priority(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, launcher={"exclusive": True})
    other = site.begin(made, "2", launcher={"partition": "urgent", "exclusive": True})
    state = made.poll(ref)
    assert not state.alive
    assert [result.cause for result in state.results] == [Cause.SIGTERM] * 2
    assert [end.cause for end in state.ends] == [Cause.HIGHER_PRIORITY]
    assert made.poll(other).alive


@pytest.mark.slow
def test_slurm_time_limit_is_signalled_before_the_limit_is_reached(site: Site) -> None:
    """A minute is the shortest limit that Slurm has; an administrator sets it here, the spec's own must leave room to train."""
    made = site.launcher()
    obeying = site.begin(made)
    deaf = site.begin(made, "2", act={"0": "deaf", "1": "deaf"})
    for ref in (obeying, deaf):
        site.cluster.run("scontrol", "update", f"JobId={site.number(ref)}", "TimeLimit=1")
    over(made, obeying, 90)
    assert [result.cause for result in made.poll(obeying).results] == [Cause.TIME_LIMIT] * 2
    assert made.poll(deaf).alive
    over(made, deaf, 150)
    state = made.poll(deaf)
    assert not state.results and [end.cause for end in state.ends] == [Cause.TIME_LIMIT]


@pytest.mark.slow
def test_slurm_node_loss_ends_the_attempt_although_its_agent_may_live(tmp_path: Path) -> None:
    with slurm_cluster(node_timeout=10) as cluster, site_on(cluster, tmp_path) as site:
        _lose_a_node(site)


def _lose_a_node(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, act={"1": "deaf"})
    agent = made.poll(ref).nodes[1].agent
    site.cluster.kill_daemon("n2")
    try:
        over(made, ref, 120)
        state = made.poll(ref)
        assert [end.cause for end in state.ends] == [Cause.NODE_LOST] and "n[1-2]" in state.ends[0].message
        assert [result.node for result in state.results] == [0]
        assert agent is not None and Path(f"/proc/{agent.pid}").exists(), "this zombie is what is fenced"
        assert made.kill(ref) == []
    finally:
        if agent is not None:
            os.kill(agent.pid, signal.SIGKILL)


def test_unavailable_slurmctld_raises_engine_unreachable(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, nodes=1)
    plan = made.plan(site.launch("2", nodes=1))
    site.cluster.kill_daemon("slurmctld", signal.SIGTERM)  # it saves what it knows
    try:
        with pytest.raises(EngineUnreachable, match=r"(?i)slurm"):
            wait_for(lambda: not made.poll(ref).alive, "an answer", 30)
        began = time.monotonic()
        for ask in (lambda: made.poll(ref), lambda: made.kill(ref), lambda: made.submit(plan)):
            with pytest.raises(EngineUnreachable):
                ask()
        assert time.monotonic() - began < 1, "each asked an engine that is known to be away"
    finally:
        site.cluster.start_daemon("slurmctld", ["slurmctld", "-D"])
    again = site.launcher()
    wait_for(lambda: _alive(again, ref), "slurmctld to be back", PATIENCE)
    again.submit(again.plan(site.launch("2", nodes=1)))
    wait_for(lambda: again.poll(plan.ref).seen, "the agent to begin", PATIENCE)


def _alive(made: SlurmLauncher, ref: AttemptRef) -> bool:
    try:
        return made.poll(ref).alive
    except EngineUnreachable:
        return False


def test_sweep_cancels_only_orphaned_slurm_jobs_of_its_own_home(site: Site, tmp_path: Path) -> None:
    made = site.launcher()
    known, orphan = site.begin(made, nodes=1), site.begin(made, "2", nodes=1)
    other = Site(site.cluster, HomePaths(tmp_path / "other"), site.python, site.started)
    foreign = other.begin(other.launcher(), "3", nodes=1)
    assert job_comment(site.home) != job_comment(other.home)
    asked: list[set[str]] = []

    def rows(names: Any) -> set[str]:
        asked.append(set(names))
        return {known.name}

    assert made.sweep(rows) == [orphan.name]
    assert asked == [{known.name, orphan.name}]
    over(made, orphan)
    assert made.poll(known).alive and made.poll(foreign).alive


def test_polls_of_all_attempts_share_one_squeue_call(site: Site, tmp_path: Path) -> None:
    log = tmp_path / "asked"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "sbatch", "sinfo", "scancel"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} >>{log}\nexec /usr/bin/{name} "$@"\n')
        (folder / name).chmod(0o755)
    settings = Settings(python=str(site.python), commands=str(folder), poll_seconds=60)
    made = SlurmLauncher(site.home, settings, {"PATH": os.environ["PATH"], **site.cluster.variables})
    plans = [made.plan(site.launch(str(i), nodes=1)) for i in range(3)]
    for plan in plans:
        made.submit(plan)
    before = log.read_text().split().count("squeue")
    for _ in range(20):
        assert all(made.poll(plan.ref).alive for plan in plans)
    assert log.read_text().split().count("squeue") == before + 1


def test_completion_log_has_jobs_that_squeue_no_longer_lists(site: Site) -> None:
    made = site.launcher()
    ref = site.begin(made, act={"0": "crash", "1": "crash"}, nodes=2)
    over(made, ref)
    commands = Commands(None, 20, {"PATH": os.environ["PATH"], **site.cluster.variables})
    (job,) = Queue(commands, 1.0).accounting_records(ref.name)
    assert (str(job.id), job.name, job.state, job.exit_code) == (site.number(ref), ref.name, "FAILED", 1)


def test_slurm_test_cluster_is_removed_when_its_test_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom tests.support.slurm import slurm_cluster\n"
        "with slurm_cluster(nodes=1) as c:\n"
        "    c.run('sbatch', '--wrap', 'setsid sleep 3600')\n"
        "    print(c.root, flush=True)\n    time.sleep(3600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        root = Path(owner.stdout.readline().strip())
    try:
        wait_for(lambda: len(processes_below(root)) >= 5, "daemons, step and job", PATIENCE)
    finally:
        owner.kill()
        owner.wait(10)
    wait_for(lambda: not processes_below(root), "all of it to end", 30)
    wait_for(lambda: not root.parent.exists(), "its directory to go", 30)
