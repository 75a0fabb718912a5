"""What code may take that has a user of its own: of each process, and of the user with all jobs together."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import procfs
from ratchet_contract.spec.job import JobSpec
from ratchet_service.__main__ import main
from ratchet_service.errors import StartError
from ratchet_service.isolation import run_as
from ratchet_service.isolation.sandbox import NO_SANDBOX, Limits, Sandbox, User, probe_limits
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.user_code.hook_probe import Probe
from tests.integration.service.launchers.test_local import launch
from tests.support.container_commands import options_of
from tests.support.run_as import AS_ROOT, UID, USER, open_home, parse_proc_status, shell_output
from tests.support.server import wait_for


@pytest.fixture
def home() -> Iterator[HomePaths]:
    with open_home() as paths:
        yield paths


def test_subprocess_query_has_hard_limits_no_core_and_no_new_privileges() -> None:
    text = shell_output(NO_SANDBOX, {"A": "b"}, Limits(memory=1 << 30, open_files=77, cpu=9))
    assert text.splitlines()[-3:] == ["77", str(1 << 20), "9"] and "\nA=b\n" in text
    found = parse_proc_status(text)
    assert found["NoNewPrivs"] == ["1"] and found["Uid"] == [str(os.geteuid())] * 4


def test_query_limits_follow_the_jobs_resources_up_to_the_services_limits() -> None:
    spec = {"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 2, "device": "cpu"}}
    spec["resources"] = {"memory": "4Gi", "open_files": 199}
    assert probe_limits(JobSpec.model_validate(spec), 70) == Limits(2 << 30, 199, 71, core=0)
    assert probe_limits(None, 60).memory is not None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert shell_output(NO_SANDBOX, {}, Limits(open_files=1 << 40)).splitlines()[-3] == str(most)


def test_hook_probe_exceeding_memory_or_open_files_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "greedy.py").write_text("import mmap\nkept = bytearray(1 << 30)\ndef f(state, bucket): ...\n")
    (tmp_path / "files.py").write_text("import os\nkept = [os.dup(2) for _ in range(200)]\ndef f(state, bucket): ...\n")
    spec = {"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 1, "device": "cpu"}}
    spec |= {"resources": {"memory": "600Mi", "open_files": 128}}
    for hook, word in (("greedy:f", "MemoryError"), ("files:f", "Too many open files")):
        made = JobSpec.model_validate({**spec, "hook": {"name": "custom", "hook": hook}})
        (problem,) = Probe(sys.executable, made, [str(tmp_path)], os.environ).check_hook(made.hook)  # type: ignore[arg-type]
        assert problem.code == "hook-import-failed" and word in problem.detail


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Limits()),
        ("processes=400", Limits(processes=400)),
        ("processes=400, file_size=2Gi", Limits(processes=400, file_size=2 << 30)),
    ],
)
def test_run_as_limits_option_is_parsed(text: str, expected: Limits) -> None:
    assert run_as.parse_limits(text) == expected


@pytest.mark.parametrize("text", ["processes=1", "processes=many", "file_size=100", "file_size=1Ki", "threads=9", "7"])
def test_run_as_limits_option_with_an_invalid_limit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--home", str(tmp_path / "home"), "--run-as-limits", text])
    assert "is not a limit: processes=NUMBER" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "reconcile"])
def test_run_as_limits_option_reaches_serve_and_reconcile(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    options = options_of([command, "--run-as", "jobs", "--run-as-limits", "processes=99"], monkeypatch)
    assert (options.run_as, options.run_as_limits) == ("jobs", Limits(processes=99))


def test_run_as_limits_need_run_as_and_stay_below_the_machines_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="needs --run-as"):
        run_as.with_defaults(Limits(processes=100), None)
    assert run_as.with_defaults(Limits(), None) == Limits()
    assert run_as.with_defaults(Limits(processes=100), USER) == Limits(processes=100)
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (500, 1000))
    assert run_as.with_defaults(Limits(), USER) == Limits(processes=500)
    for limits in (Limits(processes=1001), Limits(file_size=1 << 30)):
        with pytest.raises(StartError, match="the service's own limit is 1000"):
            run_as.with_defaults(limits, USER)


def test_most_processes_reads_the_cgroup_pids_limit(tmp_path: Path) -> None:
    for kind, groups in (("0::/a/b", tmp_path / "two"), ("7:cpu,pids:/a/b", tmp_path / "one")):
        top = groups if kind[0] == "0" else groups / "pids"
        (top / "a" / "b").mkdir(parents=True)
        (top / "a" / "pids.max").write_text("77\n")
        (top / "a" / "b" / "pids.max").write_text("max\n")
        (tmp_path / "cgroup").write_text(f"3:memory:/x\n{kind}\n")
        assert run_as.max_processes(tmp_path / "cgroup", groups) == 77
    assert run_as.max_processes(tmp_path / "none", tmp_path) > 77


def test_sandboxed_process_gets_the_users_limits_and_own_limits() -> None:
    most = Limits(processes=300, file_size=1 << 30, open_files=200)
    for limits, expected in ((Limits(), "200"), (Limits(open_files=100, core=0), "100")):
        text = shell_output(Sandbox(USER if os.geteuid() == 0 else None, most), {}, limits, "cat /proc/self/limits")
        hard = {line[:26].strip(): line[47:68].strip() for line in text.splitlines()}
        found = hard["Max processes"], hard["Max file size"], hard["Max open files"]
        assert found == ("300", str(1 << 30), expected)
        assert limits.core is None or hard["Max core file size"] == "0"


BOMB = "while (1) { defined(fork) or select(undef, undef, undef, 0.002) }"


@AS_ROOT
def test_fork_bomb_stops_at_the_process_limit_and_is_killed(home: HomePaths) -> None:
    uid, most = UID + 1, 12  # a user that no other test has processes of
    user = User(uid, uid, (uid,), "/", "bomb")
    launcher = LocalLauncher(home, ("/usr/bin/perl", "-e", BOMB), {}, Sandbox(user, Limits(processes=most, cpu=30)))
    plan = launcher.plan(launch(home))
    launcher.submit(plan)

    def theirs() -> list[int]:
        return [pid for pid, _ in procfs.processes_with_variable("RATCHET_ATTEMPT_DIR") if procfs.runs_as(pid, uid)]

    try:
        wait_for(lambda: len(theirs()) >= most, "the user to have all that it may", 30)
        assert len(theirs()) <= most
        assert launcher.kill(plan.ref)
        wait_for(lambda: theirs() == [], "nothing to be left", 10)
        assert launcher.kill(plan.ref) == []
    finally:
        with Sandbox(user).command(["/bin/sh", "-c", "kill -9 -1"], {}, cwd="/") as command:
            subprocess.run(command.argv, env=command.env, pass_fds=command.fds, check=False)


def test_end_all_stops_newly_found_processes_before_killing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else there is always one more, made while the last list was read."""
    looks, done = iter([[1], [1, 2], [2, 3], [3], [3]]), list[tuple[int, int]]()
    monkeypatch.setattr(procfs, "kill", lambda pid: done.append((signal.SIGKILL, pid)))
    monkeypatch.setattr(procfs, "_signal_group", lambda pid, number: done.append((number, pid)))
    assert procfs.kill_all(lambda: next(looks)) == [1, 2, 3]
    stop, kill = signal.SIGSTOP, signal.SIGKILL
    assert done == [(kill, 1), (stop, 2), (stop, 3), (kill, 2), (kill, 3)]


def test_end_all_leaves_no_stopped_process_without_the_variable() -> None:
    """In the group of a process that a later list names: a child that has dropped the variable is in no list."""
    script = "env -i sleep 3600 & echo $!; wait"
    first = subprocess.Popen(["sleep", "3600"])
    late = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with first, late:
        assert late.stdout is not None
        child = int(late.stdout.readline())
        try:
            looks = iter([[first.pid], [late.pid], []])
            assert procfs.kill_all(lambda: next(looks)) == sorted([first.pid, late.pid])
            wait_for(lambda: procfs.start_time(child) is None, "the child to end", 10)
        finally:
            procfs.kill(child)
