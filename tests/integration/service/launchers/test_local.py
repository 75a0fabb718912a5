"""The local launcher with real processes: what agents inherit, that none is started twice, that the dead are proved dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.isolation.sandbox import Sandbox, User
from ratchet_service.launchers.base import LaunchError
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.registry import load
from ratchet_worker.agent.rank_environment import plan_ranks
from ratchet_worker.agent.rendezvous import Rendezvous
from tests.support.api import spec
from tests.support.server import processes_below, wait_for

# Takes the lock, tells its environment and process ids, and does as argv[2:] says.
AGENT = """
import fcntl, json, os, pathlib, subprocess, sys, time
root = pathlib.Path(sys.argv[-1]).parent
lock = open(root / "agent.lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("another agent")
start = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
(root / "env.json").write_text(json.dumps({**os.environ, "SID": str(os.getsid(0)), "PWD_": os.getcwd()}))
(root / ".new").write_text(json.dumps({"pid": os.getpid(), "start_time": start, "host": "here"}))
(root / ".new").rename(root / "agent.json")
if "family" in sys.argv:
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    child = f"import subprocess, time; subprocess.Popen({sleep!r}, start_new_session=True); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
if "end" not in sys.argv:
    time.sleep(3600)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[HomePaths]:
    yield HomePaths(tmp_path)
    for pid in processes_below(tmp_path):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes_below(tmp_path), "the test's processes to go", 10)


def launcher(home: HomePaths, *words: str, **environ: str) -> LocalLauncher:
    return LocalLauncher(home, (sys.executable, "-c", AGENT, *words), {"PATH": os.environ["PATH"], **environ})


def launch(home: HomePaths, attempt: int = 1, **more: Any) -> LaunchFile:
    spec = JobSpec.model_validate({"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 2}, **more})
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=2, python=sys.executable)
    return build_launch_file(home, "job-0123456789ab", attempt, spec, resolved, (), "secret-token", Desired.RUN)


def test_local_agent_gets_secrets_but_no_service_credentials_in_its_environment(home: HomePaths) -> None:
    made = launcher(
        home,
        HOME="/root",
        SOURCE="value",
        RATCHET_HOME="/x",
        RATCHET_DATABASE_URL="postgresql://u:pw@h/d",
        ALSO="postgresql://u:pw@h/d",
        OTHER_DATABASE_URL="x",
        PGPASSWORD="pw",
    )
    plan = made.plan(launch(home, secrets={"KEY": {"from_env": "SOURCE"}}))
    assert "value" not in json.dumps(plan.printable()) and "secret-token" not in json.dumps(plan.printable())
    made.submit(plan)
    wait_for(lambda: made.poll(plan.ref).seen, "the agent to start", 30)
    env = json.loads((plan.ref.paths.root / "env.json").read_text())
    agent = made.poll(plan.ref).nodes[0].agent
    assert agent is not None
    assert env["KEY"] == "value"
    assert env["HOME"] == "/root"
    assert env["SID"] == str(agent.pid)
    assert env["RATCHET_ATTEMPT_DIR"] == str(plan.ref.paths.root)
    withheld = {"RATCHET_HOME", "RATCHET_DATABASE_URL", "ALSO", "OTHER_DATABASE_URL", "PGPASSWORD"}
    assert not withheld & set(env)
    assert plan.ref.paths.launch_file.stat().st_mode & 0o777 == 0o600
    assert "value" not in plan.ref.paths.launch_file.read_text()


def test_submit_with_an_unset_secret_variable_raises_launch_error(home: HomePaths) -> None:
    made = launcher(home)
    with pytest.raises(LaunchError, match="SOURCE, which is not set"):
        made.submit(made.plan(launch(home, secrets={"KEY": {"from_env": "SOURCE"}})))


def test_submit_with_a_service_credential_as_secret_is_refused(home: HomePaths) -> None:
    made = launcher(home, PGPASSWORD="pw")
    with pytest.raises(LaunchError, match="passed to no job"):
        made.submit(made.plan(launch(home, secrets={"KEY": {"from_env": "PGPASSWORD"}})))


@pytest.mark.parametrize(
    ("keys", "pointer"),
    [
        ({"image": "project:7"}, "/image"),
        ({"volumes": [{"claim": "data", "mount_path": "/data"}]}, "/volumes"),
        ({"resources": {"gpu": "h200"}}, "/resources/gpu"),
        ({"secrets": {"KEY": {"from_secret": {"name": "team", "key": "k"}}}}, "/secrets/KEY"),
    ],
)
def test_keys_that_need_containers_are_refused_by_the_local_launcher(
    home: HomePaths, keys: dict[str, Any], pointer: str
) -> None:
    _, problems = LocalLauncher(home).check(parse_spec(spec(**keys)))
    assert [(problem.pointer, problem.code) for problem in problems] == [(pointer, "launcher-cannot")]


def test_second_submission_starts_no_second_agent(home: HomePaths) -> None:
    first, second = launcher(home), launcher(home)
    plan = first.plan(launch(home))
    first.submit(plan)
    started = procfs.pids_with_variable("RATCHET_ATTEMPT_DIR", str(plan.ref.paths.root))
    assert len(started) == 1, "an agent is seen from its start on"
    second.submit(second.plan(launch(home)))
    wait_for(lambda: first.poll(plan.ref).seen, "the agent to start", 30)
    second.submit(second.plan(launch(home)))
    agent = first.poll(plan.ref).nodes[0].agent
    assert agent is not None
    assert procfs.pids_with_variable("RATCHET_ATTEMPT_DIR", str(plan.ref.paths.root)) == started == [agent.pid]
    assert plan.ref.paths.agent_log.read_text() == ""


def test_poll_distinguishes_unsubmitted_running_and_ended_agents(home: HomePaths) -> None:
    made = launcher(home, "end")
    plan = made.plan(launch(home))
    state = made.poll(plan.ref)
    assert (state.alive, state.seen, state.results) == (False, False, ())
    made.submit(plan)
    wait_for(lambda: made.poll(plan.ref).seen, "the agent to start", 30)
    wait_for(lambda: not made.poll(plan.ref).alive, "the agent to end", 30)
    state = made.poll(plan.ref)
    (node,) = state.nodes
    assert node.seen and node.gone and node.agent is not None
    pid = node.agent.pid

    def collected() -> bool:
        made.poll(plan.ref)
        return not Path(f"/proc/{pid}").exists()

    wait_for(collected, "the agent to leave no zombie", 30)


def test_kill_ends_grandchildren_in_their_own_sessions(home: HomePaths) -> None:
    made = launcher(home, "family")
    plan, other = made.plan(launch(home)), made.plan(launch(home, attempt=2))
    for each in (plan, other):
        made.submit(each)

    def family(root: Path) -> list[int]:
        return procfs.pids_with_variable("RATCHET_ATTEMPT_DIR", str(root))

    wait_for(lambda: len(family(plan.ref.paths.root)) == 3, "agent, child and grandchild", 30)
    wait_for(lambda: len(family(other.ref.paths.root)) == 3, "those of the other attempt", 30)
    agent = made.poll(plan.ref).nodes[0].agent
    assert agent is not None
    os.kill(agent.pid, signal.SIGKILL)
    wait_for(lambda: not made.poll(plan.ref).alive, "the agent to die", 30)
    assert len(made.kill(plan.ref)) == 2
    wait_for(lambda: made.kill(plan.ref) == [], "the rest to die", 30)
    assert len(family(other.ref.paths.root)) == 3


def test_sigstopped_agent_is_alive_until_killed(home: HomePaths) -> None:
    made = launcher(home)
    plan = made.plan(launch(home))
    made.submit(plan)
    wait_for(lambda: made.poll(plan.ref).seen, "the agent to start", 30)
    agent = made.poll(plan.ref).nodes[0].agent
    assert agent is not None
    os.kill(agent.pid, signal.SIGSTOP)
    # of two signals that are both pending the smaller is handled first, and SIGTERM is
    stat = Path(f"/proc/{agent.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the agent to stop", 30)
    made.stop(plan.ref, 1.0)
    assert made.poll(plan.ref).alive
    assert made.kill(plan.ref) == [f"process {agent.pid}"]
    wait_for(lambda: made.kill(plan.ref) == [], "it to die", 30)
    assert not made.poll(plan.ref).alive


def test_kill_does_not_end_a_process_with_a_reused_pid(home: HomePaths) -> None:
    made = launcher(home)
    plan = made.plan(launch(home))
    plan.ref.paths.root.mkdir(parents=True)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        plan.ref.paths.agent_file.write_text(json.dumps({"pid": bystander.pid, "start_time": 1, "host": "here"}))
        plan.ref.paths.lock_file.touch()
        made.stop(plan.ref, 1.0)
        assert made.kill(plan.ref) == []
        time.sleep(0.05)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)


def test_plan_shows_the_ranks_that_the_agent_will_start(home: HomePaths) -> None:
    made = launch(home, env={"A": "1"})
    plan = load(home, None)["local"].plan(made)
    real = plan_ranks(made, plan.ref.paths, Rendezvous("127.0.0.1", 1, "lo", None), inherited={})
    assert len(plan.ranks) == len(real) == 2
    for shown, planned in zip(plan.ranks, real, strict=True):
        assert shown["command"] == planned.command
        assert shown["cwd"] == str(planned.cwd)
        assert shown["env"].items() <= planned.env.items()
    assert plan.argv[1:4] == ("-P", "-m", "ratchet_worker.agent")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slrum: {}", "no launcher 'slrum'; known: local, kubernetes, slurm"),
        ("local: {speed: 3}", "has only the setting agent_host, true or false, not speed"),
        ("local: {agent_host: here}", "true or false, not agent_host: 'here'"),
        ("local: fast", "the settings of local must be a mapping"),
        ("[local]", "must be a mapping"),
        ("local: {", "cannot be read"),
        ("", "must be a mapping"),
    ],
)
def test_invalid_launchers_file_is_refused_with_the_wrong_key(home: HomePaths, text: str, said: str) -> None:
    file = home.home / "launchers.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        load(home, file)


def test_agent_host_together_with_run_as_is_refused(home: HomePaths) -> None:
    file = home.home / "launchers.yaml"
    file.write_text("local: {agent_host: true}")
    with pytest.raises(ValueError, match="omit --run-as"):
        load(home, file, Sandbox(User(1, 1, (1,), "/", "jobs")))


def test_sweep_ends_only_orphaned_processes_of_its_own_home(
    home: HomePaths, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Those of a known attempt, and of another run directory, stay."""
    elsewhere = HomePaths(tmp_path_factory.mktemp("other"))
    made, other = launcher(home), launcher(elsewhere)
    plans = [made.plan(launch(home, attempt)) for attempt in (1, 2)]
    foreign = other.plan(launch(elsewhere))
    for plan in plans:
        made.submit(plan)
    other.submit(foreign)
    try:
        wait_for(lambda: all(made.poll(plan.ref).seen for plan in plans), "the agents to start", 30)
        wait_for(lambda: other.poll(foreign.ref).seen, "the foreign agent to start", 30)
        asked: list[set[str]] = []
        known = plans[0].ref.name

        def rows(names: Collection[str]) -> set[str]:
            asked.append(set(names))
            return {known}

        assert made.sweep(rows) == [plans[1].ref.name]
        assert asked == [{plan.ref.name for plan in plans}]
        wait_for(lambda: not made.poll(plans[1].ref).alive, "the unknown one to die", 30)
        assert made.poll(plans[0].ref).alive and other.poll(foreign.ref).alive
    finally:
        other.kill(foreign.ref)


@pytest.mark.parametrize("number", ["\u00b2", "7" * 5000, "99999999999"])
def test_sweep_passes_over_a_process_that_names_an_impossible_attempt(home: HomePaths, number: str) -> None:
    """User code may start a process with any environment."""
    folder = home.jobs / "job-0123456789ab" / "attempts" / number
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {"RATCHET_ATTEMPT_DIR": str(folder)})
    try:
        made = launcher(home)
        assert made.running_attempts() == [] and made.sweep(lambda _: ()) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_with_variable_finds_a_process_immediately_after_its_spawn() -> None:
    """Within ``execve`` a process has no environment that could be read; one spawn out of two hundred was missed so."""
    for i in range(600):
        pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {"RATCHET_TEST_SPAWN": f"{os.getpid()}-{i}"})
        try:
            assert procfs.pids_with_variable("RATCHET_TEST_SPAWN", f"{os.getpid()}-{i}") == [pid]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
