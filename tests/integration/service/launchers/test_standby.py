"""Parked agents with real processes: an attempt finds in one what it finds in a cold start, and nobody else's; they are bounded,
and end with their launcher."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_contract import env_vars
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.config.standby_bounds import StandbyBounds, parse
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox
from ratchet_service.launchers.base import AttemptRef, LaunchPlan
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.local import launcher, standby
from ratchet_service.launchers.local.launcher import LocalLauncher
from tests.support import start_dump
from tests.support.fork_server import RANKS, fork_agents
from tests.support.full_matrix import full
from tests.support.server import processes_below, wait_for

DIGEST = "0" * 64
DUMP = Path(start_dump.__file__).read_text()


class Machine:
    """A run directory with its launcher, which parks at once."""

    def __init__(self, home: HomePaths, bounds: StandbyBounds, sandbox: Sandbox = NO_SANDBOX, **environ: str) -> None:
        self.home = home
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
        self.launcher = LocalLauncher(home, environ={**inherited, **environ}, sandbox=sandbox, standby=bounds)
        code = home.code / DIGEST
        code.mkdir(parents=True, exist_ok=True)
        (code / "dump.py").write_text(DUMP)
        self.refs: list[AttemptRef] = []

    def plan(self, job: str = "job-00000000000a", attempt: int = 1, owner: str = "ann", **more: Any) -> LaunchPlan:
        keys = {"world": {"ranks_per_node": 2, "device": "cpu"}, "code": {"path": "/code"}, "script": ["dump.py"]}
        spec = JobSpec.model_validate({"name": "a", **keys, **more})
        resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable, code_digest=DIGEST)
        launch: LaunchFile = build_launch_file(self.home, job, attempt, spec, resolved, (), "token", Desired.RUN)
        return replace(self.launcher.plan(launch), owner=owner)

    def start(self, plan: LaunchPlan) -> int:
        """Start the attempt, wait until its ranks are at their script, and return the agent's pid."""
        self.launcher.submit(plan)
        self.refs.append(plan.ref)
        wait_for(
            lambda: len(self.dumps(plan.ref)) == plan.launch.world_size,
            f"the ranks' dumps in {plan.ref.paths.root}",
            90,
        )
        agent = self.poll(plan.ref).nodes[0].agent
        assert agent is not None
        return int(agent.pid)

    def dumps(self, ref: AttemptRef) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(ref.paths.root.glob("dump-?"))]

    def poll(self, ref: AttemptRef) -> Any:
        return self.launcher.poll(ref)

    def wait_parked(self, ref: AttemptRef) -> int:
        """Until an agent is parked for the running attempt; its pid."""
        wait_for(lambda: self.poll(ref) and self.launcher.standby.ready, "a parked agent", 90)
        return next(parked.pid for parked in self.launcher.standby._parked if parked.ready)

    def end(self, ref: AttemptRef) -> None:
        wait_for(lambda: not self.launcher.kill(ref) and not self.poll(ref).alive, "the attempt's end", 30)

    def was_parked(self, ref: AttemptRef) -> bool:
        text = ref.paths.node(0).agent_log.read_text()
        return "start: parked" in text and "start of the ranks: cold" not in text


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(standby, "_FORK_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(standby, "_ANSWER_SECONDS", 15.0)  # other tests may run


Make = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes machines. Agents are forked by the tests' fork server, with torch imported; ``cold``: the launcher starts them, as in
    a service."""
    made: list[Machine] = []

    def make(bounds: str = "", *, cold: bool = False, **environ: str) -> Machine:
        if not cold:
            monkeypatch.setattr(launcher, "_spawn", launcher._spawn)  # restored after the test
            fork_agents(RANKS.address)
        made.append(Machine(HomePaths(tmp_path / f"home{len(made)}"), parse(bounds), **environ))
        return made[-1]

    yield make
    for each in made:
        for parked in list(each.launcher.standby._parked):
            each.launcher.standby._end(parked)
    for pid in processes_below(tmp_path):
        procfs.kill(pid)
    wait_for(lambda: not processes_below(tmp_path), "the test's processes to go", 10)


def variables(listed: str) -> dict[str, str]:
    """Of /proc/PID/environ."""
    return dict(line.split("=", 1) for line in listed.split("\0") if line)


PER_ATTEMPT = {
    "MASTER_PORT", "RATCHET_AGENT_PID", "RATCHET_ATTEMPT", "RATCHET_ATTEMPT_DIR", "RATCHET_FORK_PLANS_FD",
    "RATCHET_FORK_REPORT_FD", "RATCHET_LAUNCH_FILE", "RATCHET_NODE_DIR", "RATCHET_START", "RATCHET_STORE_FD",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
}  # fmt: skip


FORKED = {"RATCHET_FORK_PLANS_FD", "RATCHET_FORK_REPORT_FD"}
"""In what /proc lists of a forked rank. A rank that is alone on its node is forked by a parked agent only."""


def descriptors(ranks: list[dict[str, Any]]) -> list[list[str]]:
    """What the descriptors of each rank are, without the attempt's directory."""
    links = [[str(link.readlink()) for link in Path(f"/proc/{rank['pid']}/fd").iterdir()] for rank in ranks]
    directories = [rank["environ"]["RATCHET_ATTEMPT_DIR"] for rank in ranks]
    return [
        sorted(link.partition(":[")[0].replace(directory, "") for link in found)
        for found, directory in zip(links, directories, strict=True)
    ]


def same_start(cold: dict[str, Any], parked: dict[str, Any], attempts: tuple[str, str]) -> None:
    """Assert that two ranks have found the same, but for the attempt that each belongs to."""
    for one, number in ((cold, attempts[0]), (parked, attempts[1])):
        assert one["environ"]["RATCHET_ATTEMPT"] == number
        listed = variables(one["listed"])
        assert {name: listed[name] for name in listed if one["environ"].get(name) != listed[name]}.keys() <= PER_ATTEMPT
        assert listed["RATCHET_ATTEMPT_DIR"] == variables(one["agent listed"])["RATCHET_ATTEMPT_DIR"]
        assert listed["RATCHET_ATTEMPT_DIR"] == one["environ"]["RATCHET_ATTEMPT_DIR"]
    sides = [comparable(one) for one in (cold, parked)]
    different = {name: [side.get(name) for side in sides] for name in sides[0] if sides[0][name] != sides[1].get(name)}
    assert not different and sides[0].keys() == sides[1].keys(), json.dumps(different, indent=1)


def comparable(dump: dict[str, Any]) -> dict[str, Any]:
    """The dump without what each attempt has of its own: values of variables, its directory."""
    directory, alone = dump["environ"]["RATCHET_ATTEMPT_DIR"], dump["environ"]["WORLD_SIZE"] == "1"
    dump = {**dump, "agent": dump["agent"].rstrip("\0"), "pid": None}
    for name in ("environ", "listed", "agent listed"):
        found = dump[name] if name == "environ" else variables(dump[name])
        dump[name] = {
            key: "" if key in PER_ATTEMPT else found[key] for key in found.keys() - (FORKED if alone else set())
        }
    return {name: json.loads(json.dumps(value).replace(directory, "ATTEMPT")) for name, value in dump.items()}


@pytest.mark.parametrize(("ranks", "determinism"), [(2, "strict"), pytest.param(1, "off", marks=full)])
def test_parked_attempt_starts_with_all_that_a_cold_one_has(machine: Make, ranks: int, determinism: str) -> None:
    made = machine(cold=True)
    more = {
        "env": {"COLOUR": "blue"}, "resources": {"memory": f"{4 * ranks}Gi", "open_files": 1000}, "seed": 7,
        "world": {"ranks_per_node": ranks, "device": "cpu"}, "determinism": determinism,
    }  # fmt: skip
    first, second = made.plan(**more), made.plan(attempt=2, **more)
    made.start(first)
    pid = made.wait_parked(first.ref)
    opened = descriptors(made.dumps(first.ref))
    made.end(first.ref)
    assert made.start(second) == pid
    # sockets of the ranks' group are opened and closed while the script runs already
    wait_for(lambda: descriptors(made.dumps(second.ref)) == opened, f"the descriptors of a cold start, {opened}", 20)
    assert made.was_parked(second.ref) and not made.was_parked(first.ref)
    for cold, parked in zip(made.dumps(first.ref), made.dumps(second.ref), strict=True):
        same_start(cold, parked, ("1", "2"))
    assert made.poll(second.ref).alive
    made.end(second.ref)


def test_another_job_of_the_owner_starts_in_it_if_nothing_differs(machine: Make) -> None:
    made = machine()
    world = {"ranks_per_node": 2, "device": "cpu"}
    first, *others = (
        made.plan(),
        *(made.plan(f"job-00000000000{name}", world=world, labels={"a": name}) for name in "bc"),
    )
    made.start(first)
    pids = [made.wait_parked(first.ref)]
    for plan in others:
        pids.append(made.start(plan))
        texts = json.dumps(made.dumps(plan.ref))
        assert plan.ref.job_id in texts and "job-00000000000a" not in texts
    assert pids[0] == pids[1] != pids[2]
    memory = b"".join(_memory(pids[2]))  # the other was forked from the tests' fork server, which has seen all attempts
    assert [f"job-00000000000{name}".encode() in memory for name in "abc"] == [False, False, True]


def _memory(pid: int) -> Iterator[bytes]:
    """What the process has in its private writable memory."""
    with Path(f"/proc/{pid}/mem").open("rb", 0) as file:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights.startswith("rw"):
                start, end = (int(number, 16) for number in span.split("-"))
                file.seek(start)
                yield file.read(end - start)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"owner": "bob", "env": {}}, ["owner"]),
        ({"env": {"COLOUR": "red"}}, ["env.COLOUR"]),
        ({"env": {}, "seed": 8}, ["env.COLOUR", "seed"]),
        ({"determinism": "off"}, ["determinism"]),
        ({"python": sys.executable}, ["python"]),
        ({"script": None, "task": {"entrypoint": "own:Task"}}, ["script or task"]),
        ({"secrets": {"KEY": {"from_env": "KEY"}}}, ["job with secrets", "secrets.KEY"]),
    ],
    ids=str,
)
def test_another_kind_of_attempt_starts_cold_and_its_differences_are_known(
    machine: Make, other: dict[str, Any], named: list[str]
) -> None:
    made = machine()
    first, second = made.plan(env={"COLOUR": "blue"}), made.plan(**{"attempt": 2, "env": {"COLOUR": "blue"}, **other})
    environ: dict[str, str] = {}
    kind, another = (standby.kind_of(plan, environ) for plan in (first, second))
    assert isinstance(kind, standby.Kind) and isinstance(another, standby.Kind)
    assert kind != another and kind.differences(another) == another.differences(kind) == named
    assert kind == standby.kind_of(made.plan(attempt=9, env={"COLOUR": "blue"}), environ)


@pytest.mark.parametrize(
    ("spec", "environ", "why"),
    [
        ({}, {"PYTHONPATH": "/lib:src"}, "the service was started with a relative directory in PYTHONPATH"),
        ({"env": {"PYTHONPATH": "/code"}}, {}, "a job whose `env` sets PYTHONPATH"),
        ({"environment": {"requirements": ["tqdm"]}}, {}, "a job with an `environment`"),
    ],
    ids=str,
)  # fmt: skip
def test_why_no_agent_can_be_parked_is_named(
    machine: Make, spec: dict[str, Any], environ: dict[str, str], why: str
) -> None:
    assert why in str(standby.kind_of(machine().plan(**spec), environ))


def test_relative_python_path_of_the_service_is_seen_before_the_first_job(machine: Make) -> None:
    assert machine(PYTHONPATH="/lib:src").launcher.standby.view.obstacles == ["relative-pythonpath"]
    assert machine(PYTHONPATH="/lib").launcher.standby.view.obstacles == []


def test_secrets_are_parked_for_their_job_alone(machine: Make) -> None:
    made = machine("processes=1", SOURCE="value-of-the-secret")
    secrets = {"secrets": {"KEY": {"from_env": "SOURCE"}}}
    first, second, other, plain = (
        made.plan(**secrets), made.plan(attempt=2, **secrets), made.plan("job-00000000000b", **secrets),
        made.plan("job-00000000000c"),
    )  # fmt: skip
    made.start(first)
    pid = made.wait_parked(first.ref)
    for plan in (other, plain):
        assert made.start(plan) != pid and not made.was_parked(plan.ref)
    assert "value-of-the-secret" not in json.dumps([one["environ"].get("KEY") for one in made.dumps(plain.ref)])
    assert made.start(second) == pid
    assert {one["environ"]["KEY"] for one in made.dumps(second.ref)} == {"value-of-the-secret"}


def parked_for_second_attempt(machine: Make, *, cold: bool = False) -> tuple[Machine, LaunchPlan, int, int]:
    """Start an attempt, and wait until an agent is parked. Return the machine, the plan of the second attempt, and the pids of
    the parked agent and of its fork server."""
    made = machine(cold=cold)
    first, second = made.plan(), made.plan(attempt=2)
    made.start(first)
    pid = made.wait_parked(first.ref)
    server = made.launcher.standby._parked[0].server
    assert server is not None
    return made, second, pid, server


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=full)])
def test_dead_or_stopped_parked_agent_costs_no_attempt(machine: Make, how: signal.Signals) -> None:
    made, second, pid, server = parked_for_second_attempt(machine, cold=True)
    os.kill(pid, how)
    assert made.start(second) != pid
    assert not made.was_parked(second.ref)
    wait_for(lambda: procfs.start_time(pid) is None and procfs.start_time(server) is None, "the parked one's end", 10)


def test_agent_that_is_killed_while_it_waits_is_replaced(machine: Make) -> None:
    made = machine()
    first = made.plan()
    made.start(first)
    pid = made.wait_parked(first.ref)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: procfs.start_time(pid) is None or made.poll(first.ref), "the kill", 10)
    wait_for(lambda: made.wait_parked(first.ref) != pid, "another parked agent", 60)


class _EndsBeforeGo:
    """The launcher's end of the socket to a parked agent; it is closed after the agent has answered."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, _: bytes) -> None:
        self._real.close()
        raise BrokenPipeError("ended before go")


def test_handover_that_ends_after_the_answer_starts_the_attempt_once(machine: Make) -> None:
    one = machine()
    first, second = one.plan(), one.plan(attempt=2)
    one.start(first)
    pid = one.wait_parked(first.ref)
    one.end(first.ref)
    (parked,) = one.launcher.standby._parked
    parked.socket = _EndsBeforeGo(parked.socket)  # type: ignore[assignment]
    agent = one.start(second)
    assert agent != pid and procfs.start_time(pid) is None and not one.was_parked(second.ref)
    commands = [Path(f"/proc/{found}/cmdline").read_bytes() for found in one.launcher._pids(second.ref)]
    assert sum(b"ratchet_worker.agent" in command for command in commands) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=full)])
def test_dead_or_stopped_fork_server_costs_no_attempt(machine: Make, how: signal.Signals) -> None:
    made, second, pid, server = parked_for_second_attempt(machine, cold=True)
    os.kill(server, how)
    assert made.start(second) == pid
    log = second.ref.paths.node(0).agent_log.read_text()
    assert "start of the ranks: cold: the parked process " in log
    wait_for(lambda: procfs.start_time(server) is None, "the server's end", 10)


def test_attempts_that_follow_at_once_start_in_agents_that_are_forked_from_each_other(machine: Make) -> None:
    made = machine("processes=1", cold=True)
    plans = [made.plan(attempt=number) for number in range(1, 5)]
    made.start(plans[0])
    made.wait_parked(plans[0].ref)
    server = made.launcher.standby._parked[0].server
    agents = set()
    for plan in plans[1:]:
        agents.add(made.start(plan))
        assert made.was_parked(plan.ref), "there was no time for another import of torch"
        (parked,) = made.launcher.standby._parked
        found = procfs.stat(parked.pid)
        assert found is not None and found.parent not in agents, "an agent ends what is below it"
        made.launcher.stop(plan.ref, 1.0)
        wait_for(lambda ref=plan.ref: not made.poll(ref).alive, "the end of the attempt", 30)
    assert len(agents) == 3
    assert server is not None and procfs.start_time(server) is None
    assert procfs.start_time(parked.pid) is not None, "the last one waits for the next attempt"


def test_forked_agent_is_the_process_that_the_kernel_says(machine: Make) -> None:
    """The launcher may be root, and the parked agent another user's: it does not name the process that the launcher ends."""
    made = machine()
    plan = made.plan()
    kind = standby.kind_of(plan, {})
    assert not isinstance(kind, str)
    parked, theirs = standby._new(kind, None, [], [], 0.0)
    parked.forked = True
    made.launcher.standby._parked.append(parked)
    program = f"import os; os.write({theirs.fileno()}, b'forked {os.getpid()}'); os.read(0, 1)"
    with (
        theirs,
        subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.PIPE) as process,
    ):
        wait_for(lambda: made.launcher.standby._read(parked) or parked.pid, "the message", 20)
        assert parked.pid == process.pid
        made.launcher.standby._end(parked)
        assert process.wait() == -signal.SIGKILL


def test_source_that_is_killed_while_it_forks_is_replaced(machine: Make) -> None:
    made, second, pid, server = parked_for_second_attempt(machine)
    os.kill(server, signal.SIGSTOP)
    (source,) = made.launcher.standby._parked
    made.launcher.standby._fork(source, None, time.monotonic(), 0.0)
    with subprocess.Popen(["sh", "-c", "exit 7"]) as other:
        procfs.kill(pid)
        wait_for(lambda: made.wait_parked(made.refs[0]) != pid, "another parked agent", 60)
        assert other.wait() == 7, "the launcher has reaped what is not its own"
    wait_for(lambda: procfs.start_time(server) is None, "the server's end", 10)
    assert made.start(second) != pid and made.was_parked(second.ref)


def test_agent_that_is_forked_during_the_handover_is_not_below_the_attempts_agent(machine: Make) -> None:
    made, second, pid, server = parked_for_second_attempt(machine, cold=True)
    (source,) = made.launcher.standby._parked
    os.kill(server, signal.SIGSTOP)
    forked = made.launcher.standby._fork(source, None, time.monotonic(), 0.0)
    goes_on = threading.Timer(0.5, os.kill, (server, signal.SIGCONT))
    goes_on.start()
    assert made.start(second) == pid and made.was_parked(second.ref)
    goes_on.join()
    found = procfs.stat(forked.pid)
    assert found is not None and found.parent != pid, "an agent ends what is below it"


def test_no_agent_is_forked_while_memory_is_short(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, second, pid, _ = parked_for_second_attempt(machine)
    monkeypatch.setattr(standby.available_memory, "available", lambda: 2**31 - 1)
    assert made.start(second) == pid
    assert not made.launcher.standby._parked


def test_changed_library_is_not_taken_from_memory(machine: Make, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    made = machine(PYTHONPATH=str(library))
    first, second, third = (made.plan(attempt=number) for number in (1, 2, 3))
    made.start(first)
    pid = made.wait_parked(first.ref)
    (library / "upgraded.py").write_text("")
    assert made.start(second) == pid
    log = second.ref.paths.log(0).read_text()
    assert "a file that the parked process has imported was changed since" in log
    assert made.dumps(second.ref)[0]["environ"][env_vars.START].startswith("cold: a file that")
    pid = made.wait_parked(second.ref)
    assert made.start(third) == pid and made.was_parked(third.ref), "none is forked from a process with the old file"
    assert {one["environ"][env_vars.START] for one in made.dumps(third.ref)} == {"parked"}


WITH_PACKAGE = """
import sys
advance = {name for name in ("rich.table", "torchmetrics") if name in sys.modules}
import rich.table, hidden
import os
CHANGE
import torchmetrics
""" + DUMP.replace('"pid":', '"advance": sorted(advance), "hidden": hidden.__file__, "pid":')


def packages_plan(made: Machine, attempt: int, script: str = "with_package.py", change: str = "") -> LaunchPlan:
    code = made.home.code / DIGEST
    (code / script).write_text(WITH_PACKAGE.replace("CHANGE", change))
    (code / "hidden.py").write_text("")
    return made.plan(attempt=attempt, script=[script])


def test_packages_that_the_first_attempt_has_imported_are_imported_in_advance_for_the_same_code(
    machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "_DELAY_SECONDS", 1.0)
    made = machine(cold=True)
    first, second = packages_plan(made, 1), packages_plan(made, 2)
    made.start(first)
    assert first.ref.paths.imports_file.read_text().split()[-1] == "torchmetrics"
    made.wait_parked(first.ref)
    wait_for(lambda: made.poll(first.ref) and made.launcher.standby.ready == 2, "one without the packages", 60)
    (original,), (plain,) = (
        [one.pid for one in made.launcher.standby._parked if (one.code is None) is without] for without in (False, True)
    )
    made.end(first.ref)
    assert made.start(second) == original and made.was_parked(second.ref)
    cold, parked = made.dumps(first.ref), made.dumps(second.ref)
    assert [one["advance"] for one in cold] == [[], []]
    assert [one["advance"] for one in parked] == [["rich.table", "torchmetrics"]] * 2
    for one, other in zip(cold, parked, strict=True):
        same_start({**one, "advance": 0}, {**other, "advance": 0}, ("1", "2"))
    third = packages_plan(made, 3, "other.py")
    assert made.start(third) == plain and made.was_parked(third.ref), "other code: parked without the packages"
    assert [each["advance"] for each in made.dumps(third.ref)] == [[], []]


def test_packages_are_imported_in_advance_also_after_a_plain_attempt_of_the_kind(machine: Make) -> None:
    made = machine()
    plain, first, second = made.plan(), packages_plan(made, 2), packages_plan(made, 3)
    made.start(plain)
    made.wait_parked(plain.ref)
    made.end(plain.ref)
    made.start(first)
    assert [one["advance"] for one in made.dumps(first.ref)] == [[], []]

    def with_packages() -> bool:
        alive = made.poll(first.ref).alive
        return alive and any(one.ready and one.code is not None for one in made.launcher.standby._parked)

    wait_for(with_packages, "an agent with the packages", 60)
    made.end(first.ref)
    made.start(second)
    assert [one["advance"] for one in made.dumps(second.ref)] == [["rich.table", "torchmetrics"]] * 2


def test_package_imported_after_a_change_of_the_environment_is_not_imported_in_advance(machine: Make) -> None:
    made = machine()
    plan = packages_plan(made, 1, change="os.environ['COLOUR'] = 'blue'")
    made.start(plan)
    names = plan.ref.paths.imports_file.read_text().split()
    assert "rich.table" in names and "torchmetrics" not in names


def test_cold_start_says_why(machine: Make) -> None:
    made = machine()
    first, other = made.plan(), made.plan("job-00000000000b", seed=9)
    made.start(first)
    pid = made.wait_parked(first.ref)
    made.start(other)
    starts = [made.dumps(ref)[1]["environ"][env_vars.START] for ref in (first.ref, other.ref)]
    assert starts[0] == "cold: no agent of this kind is parked yet"
    assert starts[1] == "cold: no agent of this kind is parked yet (the nearest parked one has another seed)"
    assert f"start: {starts[1]}" in other.ref.paths.node(0).agent_log.read_text()
    again = made.plan(attempt=2)
    assert made.start(again) == pid
    assert {one["environ"][env_vars.START] for one in made.dumps(again.ref)} == {"parked"}


def test_cold_start_names_few_of_many_differences(machine: Make) -> None:
    made = machine()
    first, other = (
        made.plan(attempt=attempt, env={f"{word}_NAME_{number}": "1" for number in range(5000)})
        for attempt, word in ((1, "FIRST"), (2, "OTHER"))
    )
    made.start(first)
    made.wait_parked(first.ref)
    made.start(other)
    start = made.dumps(other.ref)[1]["environ"][env_vars.START]
    assert "another env.FIRST_NAME_0, env.FIRST_NAME_1, " in start and start.endswith(" and 9995 more)")


def test_fork_server_that_has_called_cuda_forks_no_rank(machine: Make, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    text = "import os\nif 'RATCHET_FORK_PLANS_FD' in os.environ and 'RATCHET_PARKED' in os.environ:\n"
    (library / "sitecustomize.py").write_text(f"{text}    import torch.cuda\n    torch.cuda._initialized = True\n")
    made = machine(PYTHONPATH=str(library))
    first, second = made.plan(), made.plan(attempt=2)
    made.start(first)
    pid = made.wait_parked(first.ref)
    assert made.start(second) == pid
    starts = {one["environ"][env_vars.START] for one in made.dumps(second.ref)}
    assert starts == {"cold: an import has called CUDA's driver"}


def test_jobs_on_gpus_are_parked_for_any_gpu(machine: Make) -> None:
    made = machine()
    plans = [made.plan(world={"ranks_per_node": 1, "device": "cuda"}) for _ in range(2)]
    on_gpus = [
        replace(plan, launch=plan.launch.model_copy(update={"gpus": [gpu], "resolved": plan.launch.resolved.model_copy(
            update={"device": "cuda", "backend": "nccl"})}))
        for gpu, plan in enumerate(plans)
    ]  # fmt: skip
    kinds = [standby.kind_of(plan, {}) for plan in (*on_gpus, made.plan())]
    assert kinds[0] == kinds[1] != kinds[2] and not isinstance(kinds[0], str)


def test_number_is_bounded_and_running_jobs_come_first(machine: Make) -> None:
    made = machine("processes=1")
    first, other = made.plan(), made.plan("job-00000000000b", seed=9)
    made.start(first)
    pid = made.wait_parked(first.ref)
    made.start(other)
    for _ in range(5):
        made.poll(other.ref)
    assert [parked.pid for parked in made.launcher.standby._parked] == [pid], "the first job still runs"
    made.end(first.ref)
    assert made.wait_parked(other.ref) != pid, "the place of one that no running job needs is taken"
    wait_for(lambda: procfs.start_time(pid) is None, "the end of the first", 10)


@full
def test_as_many_are_parked_as_attempts_of_the_kind_run(machine: Make) -> None:
    made = machine("processes=3")
    plans = [made.plan(f"job-00000000000{name}") for name in "abcd"]
    for plan in plans[:2]:
        made.start(plan)

    def parked(number: int) -> set[int]:
        def ready() -> bool:
            return all(made.poll(ref).alive for ref in made.refs) and made.launcher.standby.ready == number

        wait_for(ready, f"{number} parked agents", 120)
        return {parked.pid for parked in made.launcher.standby._parked}

    pids = parked(2)
    assert {made.start(plan) for plan in plans[2:]} == pids
    assert all(made.was_parked(plan.ref) for plan in plans[2:])
    others = parked(3)  # four attempts run, at most three are parked
    assert not others & pids
    other = made.plan("job-00000000000e", seed=9)
    made.start(other)
    wait_for(lambda: made.poll(other.ref) and made.launcher.standby.ready == 3, "one of the other kind", 90)
    assert len(others & parked(3)) == 2, "a kind without any takes the place of one of three"


def test_age_after_the_last_attempt_is_bounded(machine: Make) -> None:
    made = machine("seconds=2")
    plan = made.plan()
    made.start(plan)
    pid = made.wait_parked(plan.ref)
    end = time.monotonic() + 3.0
    wait_for(lambda: made.poll(plan.ref) and time.monotonic() > end, "more than its age", 10)
    assert made.wait_parked(plan.ref) == pid, "its job still runs"
    made.end(plan.ref)
    wait_for(lambda: made.launcher.sweep(lambda names: names) or procfs.start_time(pid) is None, "its end", 20)


def test_too_large_one_is_ended_and_the_log_names_its_size_and_the_option(
    machine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = machine("memory=1Mi")
    first = made.plan()
    made.start(first)
    wait_for(lambda: made.poll(first.ref) and "(--standby memory)" in caplog.text, "the refusal", 60)
    assert re.search(r"uses [1-9]\d+ MiB of memory, at most 1 MiB are allowed", caplog.text)
    assert not made.launcher.standby._parked and made.launcher.standby.view.obstacles == ["too-large"]
    time.sleep(0.1)
    made.poll(first.ref)
    assert not made.launcher.standby._parked, "it would be too large again"


def test_one_that_ends_during_its_imports_is_not_replaced_and_the_next_start_says_what_it_printed(
    machine: Make, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    text = "import os\nif 'RATCHET_PARKED' in os.environ:\n    os.write(1, b'no\\0space')\n    os._exit(1)\n"
    (library / "sitecustomize.py").write_text(text)
    made = machine(PYTHONPATH=str(library))
    first, second = made.plan(), made.plan(attempt=2)
    made.start(first)
    wait_for(lambda: made.poll(first.ref) and made.launcher.standby.view.obstacles == ["ended"], "the refusal", 60)
    made.start(second)
    start = made.dumps(second.ref)[1]["environ"][env_vars.START]
    assert start == "cold: no agent is parked: it has ended. no\ufffdspace"


def test_no_agent_is_parked_while_memory_is_short(
    machine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standby.available_memory, "available", lambda: 2**31 - 2**20)
    made = machine()
    plan = made.plan()
    made.start(plan)
    wait_for(
        lambda: made.poll(plan.ref) and "2047 MiB of memory are free, 2048 MiB wanted" in caplog.text, "the refusal", 60
    )
    assert not made.launcher.standby._parked
    monkeypatch.setattr(standby.available_memory, "available", lambda: 2**31)
    assert made.launcher.standby.view.obstacles == ["memory-short"], "no other is parked for a while"


def test_agent_that_cannot_be_parked_does_not_disturb_the_attempt(
    machine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_more_files(*args: object) -> None:  # a mock: at the real limit, the test itself could open no file
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(standby, "socket", SimpleNamespace(**{**vars(socket), "socketpair": no_more_files}))
    made = machine()
    plan = made.plan()
    made.start(plan)
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    wait_for(lambda: made.poll(plan.ref).alive and "Too many open files" in caplog.text, "the refusal", 30)
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
    assert made.launcher.standby.view.obstacles == ["not-started"]


def test_attempt_starts_parked_if_no_successor_can_be_forked(
    machine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = machine("processes=1", cold=True)
    first, second = made.plan(), made.plan(attempt=2)
    made.start(first)
    pid = made.wait_parked(first.ref)

    def no_more_files(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(standby, "socket", SimpleNamespace(**{**vars(socket), "socketpair": no_more_files}))
    assert made.start(second) == pid and made.was_parked(second.ref)
    assert "no agent is forked: [Errno 24] Too many open files" in caplog.text


@full
def test_restarts_leave_no_process_descriptor_or_file(machine: Make) -> None:
    made = machine(cold=True)
    counts, names = [], []
    for attempt in range(1, 5):
        plan = made.plan(attempt=attempt)
        made.start(plan)
        made.wait_parked(plan.ref)
        made.end(plan.ref)
        left = [pid for pid in procfs.pids() if (found := procfs.stat(pid)) and found.parent == os.getpid()]
        counts.append((len(left), len(list(Path("/proc/self/fd").iterdir()))))
        names.append(sorted(path.name for path in made.home.home.iterdir()))
    assert counts[1:] == counts[1:2] * 3 and names[1:] == names[1:2] * 3
    assert [made.was_parked(ref) for ref in made.refs] == [False, True, True, True]


LAUNCHER = """
import sys, time
from pathlib import Path
from ratchet_contract.paths import HomePaths
from ratchet_service.config.standby_bounds import parse
from ratchet_service.launchers.local import standby
from tests.integration.service.launchers.test_standby import Machine
standby._DELAY_SECONDS = 0.0
made = Machine(HomePaths(Path(sys.argv[1])), parse(""))
plan = made.plan()
print(made.start(plan), made.wait_parked(plan.ref), flush=True)
time.sleep(3600)
"""


def test_killed_launcher_takes_parked_agents_with_it_and_leaves_attempts_alone(machine: Make, tmp_path: Path) -> None:
    home = tmp_path / "killed"
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(home)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, env_vars.STANDBY: ""},
    ) as process:
        assert process.stdout is not None
        agent, parked = map(int, process.stdout.readline().split())
        server = next(pid for pid in procfs.live_descendants(parked))
        process.kill()
    wait_for(lambda: procfs.start_time(parked) is None and procfs.start_time(server) is None, "their end", 10)
    assert procfs.start_time(agent) is not None
    procfs.kill(agent)
    machine()  # ends what is below tmp_path
