"""What code may take that has a user of its own: of each process, and of the user with all jobs together."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_service import user_limits
from ratchet_service.__main__ import main
from ratchet_service.confined import OWN, Confined, Limits, User, limits_of
from ratchet_service.hook_probe import Probe
from ratchet_service.launchers import processes
from ratchet_service.launchers.local import LocalLauncher
from ratchet_service.listening import StartError
from tests.integration.test_local_launcher import launch
from tests.support.deployment import options_of
from tests.support.run_as import AS_ROOT, UID, USER, open_home, said, status
from tests.support.server import wait_for


@pytest.fixture
def home() -> Iterator[HomePaths]:
    with open_home() as paths:
        yield paths


def test_a_look_has_hard_limits_no_core_and_cannot_gain_rights() -> None:
    text = said(OWN, {"A": "b"}, Limits(memory=1 << 30, open_files=77, cpu=9))
    assert text.splitlines()[-3:] == ["77", str(1 << 20), "9"] and "\nA=b\n" in text
    found = status(text)
    assert found["NoNewPrivs"] == ["1"] and found["Uid"] == [str(os.geteuid())] * 4


def test_limits_are_the_jobs_own_where_it_has_some_and_never_above_the_services() -> None:
    spec = {"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 2, "device": "cpu"}}
    spec["resources"] = {"memory": "4Gi", "open_files": 199}
    assert limits_of(JobSpec.model_validate(spec), 70) == Limits(2 << 30, 199, 71, core=0)
    assert limits_of(None, 60).memory is not None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert said(OWN, {}, Limits(open_files=1 << 40)).splitlines()[-3] == str(most)


def test_a_hook_that_takes_too_much_is_ended_by_its_limits(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "greedy.py").write_text("import mmap\nkept = bytearray(1 << 30)\ndef f(state, bucket): ...\n")
    (tmp_path / "files.py").write_text("import os\nkept = [os.dup(2) for _ in range(200)]\ndef f(state, bucket): ...\n")
    spec = {"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 1, "device": "cpu"}}
    spec |= {"resources": {"memory": "600Mi", "open_files": 128}}
    for hook, word in (("greedy:f", "MemoryError"), ("files:f", "Too many open files")):
        made = JobSpec.model_validate({**spec, "hook": {"name": "custom", "hook": hook}})
        (problem,) = Probe(sys.executable, made, [str(tmp_path)], os.environ).hook(made.hook)  # type: ignore[arg-type]
        assert problem.code == "hook-import-failed" and word in problem.detail


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Limits()),
        ("processes=400", Limits(processes=400)),
        ("processes=400, file_size=2Gi", Limits(processes=400, file_size=2 << 30)),
    ],
)
def test_what_the_user_of_jobs_may_take_is_said_in_one_option(text: str, expected: Limits) -> None:
    assert user_limits.parse(text) == expected


@pytest.mark.parametrize("text", ["processes=1", "processes=many", "file_size=100", "file_size=1Ki", "threads=9", "7"])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--home", str(tmp_path / "home"), "--run-as-limits", text])
    assert "is no limit: processes=NUMBER" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "reconcile"])
def test_the_command_line_hands_them_on(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    options = options_of([command, "--run-as", "jobs", "--run-as-limits", "processes=99"], monkeypatch)
    assert (options.run_as, options.run_as_limits) == ("jobs", Limits(processes=99))


def test_limits_of_a_user_need_one_and_are_never_above_the_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="needs --run-as"):
        user_limits.settled(Limits(processes=100), None)
    assert user_limits.settled(Limits(), None) == Limits()
    assert user_limits.settled(Limits(processes=100), USER) == Limits(processes=100)
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (500, 1000))
    assert user_limits.settled(Limits(), USER) == Limits(processes=500)
    for limits in (Limits(processes=1001), Limits(file_size=1 << 30)):
        with pytest.raises(StartError, match="may have 1000 at the most"):
            user_limits.settled(limits, USER)


def test_of_the_machines_processes_control_groups_say_how_many(tmp_path: Path) -> None:
    for kind, groups in (("0::/a/b", tmp_path / "two"), ("7:cpu,pids:/a/b", tmp_path / "one")):
        top = groups if kind[0] == "0" else groups / "pids"
        (top / "a" / "b").mkdir(parents=True)
        (top / "a" / "pids.max").write_text("77\n")
        (top / "a" / "b" / "pids.max").write_text("max\n")
        (tmp_path / "cgroup").write_text(f"3:memory:/x\n{kind}\n")
        assert user_limits.most_processes(tmp_path / "cgroup", groups) == 77
    assert user_limits.most_processes(tmp_path / "none", tmp_path) > 77


def test_every_process_of_the_users_has_that_users_limits_and_its_own() -> None:
    most = Limits(processes=300, file_size=1 << 30, open_files=200)
    for limits, expected in ((Limits(), "200"), (Limits(open_files=100, core=0), "100")):
        text = said(Confined(USER if os.geteuid() == 0 else None, most), {}, limits, "cat /proc/self/limits")
        hard = {line[:26].strip(): line[47:68].strip() for line in text.splitlines()}
        found = hard["Max processes"], hard["Max file size"], hard["Max open files"]
        assert found == ("300", str(1 << 30), expected)
        assert limits.core is None or hard["Max core file size"] == "0"


BOMB = "while (1) { defined(fork) or select(undef, undef, undef, 0.002) }"


@AS_ROOT
def test_what_forks_without_an_end_stops_at_its_users_limit_and_is_ended(home: HomePaths) -> None:
    uid, most = UID + 1, 12  # a user that no other test has processes of
    user = User(uid, uid, (uid,), "/", "bomb")
    launcher = LocalLauncher(home, ("/usr/bin/perl", "-e", BOMB), {}, Confined(user, Limits(processes=most, cpu=30)))
    plan = launcher.plan(launch(home))
    launcher.submit(plan)

    def theirs() -> list[int]:
        return [pid for pid, _ in processes.values_of("RATCHET_ATTEMPT_DIR") if processes.is_of(pid, uid)]

    try:
        wait_for(lambda: len(theirs()) >= most, "the user to have all that it may", 30)
        assert len(theirs()) <= most
        assert launcher.kill(plan.ref)
        wait_for(lambda: theirs() == [], "nothing to be left", 10)
        assert launcher.kill(plan.ref) == []
    finally:
        with Confined(user).command(["/bin/sh", "-c", "kill -9 -1"], {}, cwd="/") as command:
            subprocess.run(command.argv, env=command.env, pass_fds=command.fds, check=False)


def test_what_appears_while_an_attempt_is_killed_is_stopped_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else there is always one more, made while the last list was read."""
    looks, done = iter([[1], [1, 2], [2, 3], [3], [3]]), list[tuple[str, int]]()
    monkeypatch.setattr(processes, "kill", lambda pid: done.append(("killed", pid)))
    monkeypatch.setattr(processes, "_stop_group", lambda pid: done.append(("stopped", pid)))
    assert processes.end_all(lambda: next(looks)) == [1, 2, 3]
    assert done == [("killed", 1), ("stopped", 2), ("stopped", 3), ("killed", 2), ("killed", 3)]
