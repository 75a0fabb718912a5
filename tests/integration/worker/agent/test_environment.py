"""The environment for a job's requirements: built once, used by all, and built without a way to the service's variables or to the
files of others. The packages are the tests' own, and pip gets no index."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause, NoteType
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import node_rank
from ratchet_worker.agent.environment import KEPT, RECORD
from ratchet_worker.ipc.progress_counter import CounterReader
from tests.support.attempts import Attempt, process_environment
from tests.support.local_packages import make_sdist, make_wheel
from tests.support.server import processes_below, wait_for

BUILD_SECONDS = 150.0
"""The longest that a build may take: two seconds of a core."""
WAIT = """
import os, time
def find():
    while not os.path.exists(os.environ["GATE"]):
        time.sleep(0.02)
"""
TALK = """
def find():
    while True:
        print("word " * 1000, flush=True)
"""
EXPLORE = """
import glob, os
def tried(act):
    try:
        act()
        return "done"
    except OSError as error:
        return error.strerror
def find():
    def secrets():
        found = []
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                found += [path] * (b"top-secret" in open(path, "rb").read())
            except OSError:
                pass
        return found
    return {
        "secrets": secrets(), "own": sorted(k for k, v in os.environ.items() if "top-secret" in v),
        "descriptors": [os.readlink(f) for f in glob.glob("/proc/self/fd/*") if os.path.exists(f)],
        "launch": tried(lambda: open(os.environ["RATCHET_ATTEMPT_DIR"] + "/launch.json").read()),
        "run directory": sorted(os.listdir(os.environ["RUN_DIRECTORY"])),
        "other environment": tried(lambda: open(os.environ["OTHER"], "a")),
        "elsewhere": tried(lambda: open(os.environ["ELSEWHERE"], "w")),
        "system": tried(lambda: open("/etc/written-by-a-build", "w")),
        "writable again": os.system("mount -o remount,rw / 2>/dev/null") == 0,
        "uid": os.getuid(), "pip": os.environ.get("PIP_EXTRA_INDEX_URL"),
    }
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "pleasant", "1.0", "VALUE = 5")
    make_sdist(folder, "waits", "1.0", WAIT)
    make_sdist(folder, "hostile", "1.0", EXPLORE)
    return folder


class Jobs:
    """Attempts of several jobs that have one run directory."""

    def __init__(self, home: Path, wheels: Path) -> None:
        self.home, self._wheels, self.made = home, wheels, list[Attempt]()

    def attempt(self, *requirements: str, env: dict[str, str] | None = None, **spec: Any) -> Attempt:
        variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self._wheels), **(env or {})}
        given = {"environment": {"requirements": list(requirements)}, "env": variables, **spec}
        place = self.home / f"job-{len(self.made)}"
        made = Attempt(place, [{}], spec=given, environments_dir=str(self.home / "environments"))
        self.made.append(made)
        return made

    @property
    def environments(self) -> list[Path]:
        """The complete ones."""
        return [path.parent for path in self.home.glob(f"environments/{os.geteuid()}/*/{RECORD}")]

    @property
    def directories(self) -> list[Path]:
        return [path for path in self.home.glob(f"environments/{os.geteuid()}/*") if path.is_dir()]


@pytest.fixture
def jobs(tmp_path: Path, wheels: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path, wheels)
    yield made
    for attempt in made.made:
        attempt.close()


def rank_environment(attempt: Attempt) -> tuple[str, dict[str, str]]:
    """Interpreter and variables of the attempt's rank."""

    def started() -> bool:
        assert attempt.agents[-1].poll() is None, attempt.log()
        return CounterReader(attempt.paths.counter(0)).read() is not None

    wait_for(started, "the rank to start", BUILD_SECONDS)
    pid = attempt.pid_of(0)
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(), process_environment(pid)


def test_environment_is_built_once_and_serves_jobs_and_attempts(jobs: Jobs) -> None:
    first, second = jobs.attempt("pleasant>=1"), jobs.attempt("pleasant>=1")
    first.service.start()
    second.service.start()
    agents = [first.start(), second.start()]
    (python, variables), (other, _) = rank_environment(first), rank_environment(second)
    (place,) = jobs.environments
    assert python == other == str(place / "bin/python") and place.stat().st_mode & 0o077 == 0
    record = json.loads((place / RECORD).read_text())
    assert record["packages"] == ["pleasant==1.0"] and record["digest"] == variables["RATCHET_ENVIRONMENT_DIGEST"]
    assert sum("building the environment" in each.log() for each in (first, second)) == 1
    builder = first if "building" in first.log() else second
    events = builder.service.messages[node_rank(0)]
    wait_for(lambda: len(events) >= 2, "the events")
    assert {event.type for event in events} == {NoteType.ENVIRONMENT}
    assert "with 1 requirement" in events[0].message and "environment.log" in events[1].message
    assert "Successfully installed pleasant-1.0" in builder.paths.environment_log.read_text()
    for agent in agents:
        agent.kill()
    third = jobs.attempt("pleasant>=1")
    third.start()
    assert rank_environment(third)[0] == python and "building" not in third.log()
    for i in range(KEPT + 1):  # those that no attempt uses, and what a killed build has left
        (place.with_name(f"other{i}")).mkdir()
        if i:
            (place.with_name(f"other{i}") / RECORD).touch()
            os.utime(place.with_name(f"other{i}") / RECORD, (i, i))
    fourth = jobs.attempt("pleasant>=1")
    fourth.start()
    rank_environment(fourth)
    assert sorted(path.name for path in jobs.directories if path != place) == sorted(
        f"other{i}" for i in range(2, KEPT + 1)
    )


def test_requirements_that_cannot_be_installed_end_the_job_and_network_faults_do_not(jobs: Jobs) -> None:
    absent = jobs.attempt("nothing-of-this-name==1")
    network = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1"}
    unreachable = jobs.attempt("nothing-of-this-name==1", env=network)
    for each in (absent, unreachable):
        each.start()
    result = absent.wait(BUILD_SECONDS)
    assert result.cause is Cause.USER_ERROR and result.message is not None
    assert "No matching distribution found for nothing-of-this-name==1" in result.message and not result.ranks
    assert unreachable.wait(BUILD_SECONDS).cause is Cause.LAUNCHER_ERROR
    old = jobs.attempt("torch<2.9")  # as pip decides: a requirement of Ratchet contradicts
    old.start()
    result = old.wait(BUILD_SECONDS)
    assert result.cause is Cause.USER_ERROR and "torch" in str(result.message)
    assert jobs.directories == []


def test_environment_that_is_built_again_has_the_versions_of_the_first_build(
    jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("index")
    env = {"PIP_FIND_LINKS": str(folder)}
    old = make_wheel(folder, "pleasant", "1.0", "")
    first = jobs.attempt("pleasant>=1", env=env)
    agent = first.start()
    rank_environment(first)
    agent.kill()
    wait_for(lambda: not processes_below(first.paths.root), "the attempt to end", 10)
    (place,) = jobs.environments
    shutil.rmtree(place)  # as of an environment that was not used for long
    make_wheel(folder, "pleasant", "2.0", "")
    again = jobs.attempt("pleasant>=1", env=env)
    agent = again.start()
    rank_environment(again)
    assert json.loads((place / RECORD).read_text())["packages"] == ["pleasant==1.0"]
    agent.kill()
    wait_for(lambda: not processes_below(again.paths.root), "the attempt to end", 10)
    shutil.rmtree(place)
    (folder / old).unlink()
    withdrawn = jobs.attempt("pleasant>=1", env=env)
    withdrawn.start()
    result = withdrawn.wait(BUILD_SECONDS)
    (versions,) = place.parent.glob("*.versions")
    assert result.cause is Cause.USER_ERROR and f"delete {versions}" in str(result.message)
    versions.unlink()
    chosen = jobs.attempt("pleasant>=1", env=env)
    chosen.start()
    rank_environment(chosen)
    assert json.loads((place / RECORD).read_text())["packages"] == ["pleasant==2.0"]


def test_environment_that_a_job_has_changed_is_built_again_or_named(jobs: Jobs) -> None:
    first = jobs.attempt("pleasant>=1")
    first.start()
    rank_environment(first)
    (place,) = jobs.environments
    (folder,) = place.glob("lib/python*/site-packages")
    (folder / "extra-1.0.dist-info").mkdir()  # as pip leaves it, started by a job

    def event_of_next(text: str) -> Attempt:
        attempt = jobs.attempt("pleasant>=1")
        attempt.service.start()
        attempt.start()
        rank_environment(attempt)
        events = attempt.service.messages[node_rank(0)]
        wait_for(lambda: any(text in event.message for event in events), "the event")
        assert any("+extra==1.0" in event.message for event in events)
        return attempt

    second = event_of_next("used as it is")
    assert (folder / "extra-1.0.dist-info").exists()
    for attempt in (first, second):
        attempt.agents[-1].kill()
        wait_for(lambda attempt=attempt: not processes_below(attempt.paths.root), "the attempt to end", 10)
    event_of_next("built again")
    assert not (folder / "extra-1.0.dist-info").exists() and list(folder.glob("pleasant.py"))


def test_build_that_writes_without_end_is_ended(jobs: Jobs, wheels: Path) -> None:
    make_sdist(wheels, "talks", "1.0", TALK)
    attempt = jobs.attempt("talks", env={"PIP_VERBOSE": "1"})
    bounded = attempt.launch.model_copy(update={"log_bytes": 1 << 20})
    attempt.paths.launch_file.write_text(bounded.model_dump_json())
    attempt.start()
    result = attempt.wait(BUILD_SECONDS)
    assert result.cause is Cause.USER_ERROR and "more than 1 MiB" in str(result.message)
    assert not processes_below(attempt.paths.root) and jobs.directories == []


def test_stop_and_kill_during_a_build_leave_nothing_that_is_used(jobs: Jobs, tmp_path: Path) -> None:
    gate = tmp_path.with_name(f"{tmp_path.name}-gate")
    env = {"GATE": str(gate)}
    stopped, killed = jobs.attempt("waits", env=env), jobs.attempt("pleasant", "waits", env=env)
    agents = [each.start() for each in (stopped, killed)]

    def builds(attempt: Attempt) -> bool:
        """The package's own code runs."""
        for pid in attempt.rank_pids():
            with suppress(OSError):
                if b"build_wheel" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
        return False

    wait_for(lambda: builds(stopped) and builds(killed), "the builds to wait", BUILD_SECONDS)
    waiting = jobs.attempt("waits", env=env)
    waiter = waiting.start()
    wait_for(lambda: "waiting for it" in waiting.log(), "the third attempt to wait", BUILD_SECONDS)
    waiter.send_signal(signal.SIGTERM)
    assert waiting.wait().cause is Cause.SIGTERM
    agents[0].send_signal(signal.SIGTERM)
    assert stopped.wait().cause is Cause.SIGTERM
    agents[1].kill()
    wait_for(lambda: not processes_below(killed.paths.root), "the killed build to end", 10)
    assert jobs.environments == [] and len(jobs.directories) == 1  # the killed one's
    gate.touch()
    again = jobs.attempt("pleasant", "waits", env=env)
    again.start()
    python, _ = rank_environment(again)
    assert jobs.environments == jobs.directories == [Path(python).parents[1]]


def test_build_script_cannot_read_variables_of_the_service_or_write_elsewhere(jobs: Jobs, tmp_path: Path) -> None:
    jobs.attempt("pleasant")
    other = tmp_path / "environments" / str(os.geteuid()) / "other" / RECORD
    other.parent.mkdir(parents=True)
    other.touch()
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    env = {
        "OTHER": str(other), "RUN_DIRECTORY": str(tmp_path), "ELSEWHERE": str(elsewhere), "HIDDEN": "top-secret",
        "PIP_EXTRA_INDEX_URL": "https://user:top-secret@example.com",
    }  # fmt: skip
    attempt = jobs.attempt("hostile", env=env, secret_env=["HIDDEN"], secrets={"KEY": {"from_env": "SERVICE_KEY"}})
    attempt.start({"SERVICE_KEY": "top-secret", "DATABASE_PASSWORD": "top-secret"})
    python, variables = rank_environment(attempt)
    assert variables["KEY"] == variables["HIDDEN"] == "top-secret"  # the ranks' own
    source = next(Path(python).parents[1].glob("lib/python*/site-packages/hostile.py")).read_text()
    found = ast.literal_eval(source.removeprefix("FOUND = "))
    # the index is for pip, which is what starts the build
    assert found["own"] == ["PIP_EXTRA_INDEX_URL"] and found["uid"] == os.geteuid()
    if "not confined" in attempt.log():
        pytest.skip("the system permits no user namespaces: only the variables were checked")
    assert found["launch"] == found["other environment"] == "No such file or directory"
    assert found["elsewhere"] == found["system"] == "Read-only file system" and not found["writable again"]
    assert not elsewhere.exists() and other.read_text() == ""
    assert found["run directory"] == ["environments", attempt.home.home.name]  # the places to write to, and no more
    named = [path for path in found["descriptors"] if path.startswith("/") and not path.startswith(("/proc", "/dev"))]
    assert set(named) <= {str(attempt.paths.environment_log)}
    # of the build's own processes, which have the index; those of the service and of the agent are not there
    visible = {int(path.split("/")[2]) for path in found["secrets"]}
    assert all(pid < 50 for pid in visible) and procfs.start_time(attempt.agents[0].pid) is not None


def test_build_without_namespaces_works_and_says_so(jobs: Jobs, tmp_path: Path) -> None:
    """As in a container whose kernel lets nobody create namespaces."""
    prefix = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    prefix += ['echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("the system permits no user namespaces: all other tests run so")
    python = tmp_path.with_name(f"{tmp_path.name}-python")
    python.write_text(f'#!/bin/sh\nexec {shlex.join([*prefix, sys.executable])} "$@"\n')
    python.chmod(0o755)
    limits = {"memory": "1Gi", "open_files": 256}
    attempt = jobs.attempt("pleasant", "ratchet-train[worker]", python=str(python), resources=limits)
    resolved = attempt.launch.resolved.model_copy(update={"python": str(python)})
    attempt.paths.launch_file.write_text(attempt.launch.model_copy(update={"resolved": resolved}).model_dump_json())
    attempt.service.start()
    attempt.start()
    rank_environment(attempt)
    events = attempt.service.messages[node_rank(0)]
    wait_for(lambda: len(events) >= 2, "the events")
    assert "not confined, since the system does not permit it: unshare: " in events[1].message
    assert "pleasant==1.0" in events[1].message and "Downloading" not in attempt.paths.environment_log.read_text()
