"""Users' code under a user of its own: whom it runs as, within what, and what the service does in its directories."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.messages import AgentFile
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_service import children, doctor_jobs, file_owner, serve, user_limits, worker_user
from ratchet_service.__main__ import main
from ratchet_service.confined import OWN, Command, Confined, Limits, User, limits_of
from ratchet_service.hook_probe import Probe
from ratchet_service.launchers import files, processes
from ratchet_service.launchers.base import AttemptRef, LaunchError
from ratchet_service.launchers.local import LocalLauncher
from ratchet_service.launchers.table import load
from ratchet_service.listening import Listening, StartError
from ratchet_service.machine import Machine
from ratchet_service.preflight import resolve
from ratchet_service.preflight_report import Report
from ratchet_service.roots import Roots
from ratchet_service.settings import Settings
from ratchet_service.usecases.logs import LogFilter, read_lines
from tests.integration.test_local_launcher import launch
from tests.support.run_as import AS_ROOT, UID, USER, open_directory
from tests.support.server import processes_below, wait_for

TELL = "cat /proc/self/status; env; pwd; ulimit -Hn; ulimit -Hd; ulimit -Ht"
JOB = "job-0123456789ab"


@pytest.fixture
def home() -> Iterator[HomePaths]:
    with open_directory() as root:
        paths = HomePaths(root / "home")
        for folder in (paths.home, paths.jobs):
            folder.mkdir(mode=0o711)
            folder.chmod(0o711)
        paths.run_as_file.touch()
        yield paths
        for pid in processes_below(root):
            processes.kill(pid)
        wait_for(lambda: not processes_below(root), "the test's processes to go", 10)


def said(confined: Confined, environ: dict[str, str], limits: Limits | None = None, script: str = TELL) -> str:
    with confined.command(["/bin/sh", "-c", script], environ, limits, cwd="/") as started:
        return run(started)


def run(started: Command) -> str:
    done = subprocess.run(
        started.argv, env=started.env, pass_fds=started.fds, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def status(text: str) -> dict[str, list[str]]:
    rows = (line.partition(":") for line in text.splitlines())
    return {key: value.split() for key, _, value in rows}


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


def test_what_a_submitter_chose_is_in_no_process_of_root(tmp_path: Path) -> None:
    """A library to preload would run as whoever the process is before it becomes the user."""
    with Confined(USER).command(["/bin/true"], {"LD_PRELOAD": "/evil.so", "KEY": "secret"}) as started:
        assert "LD_PRELOAD" not in started.env and "secret" not in str(started)
        assert json.loads(os.pread(started.fds[0], 1 << 16, 0))["environ"]["LD_PRELOAD"] == "/evil.so"


@pytest.mark.parametrize(
    ("given", "words"),
    [("no-such-user", "has no user"), ("4000000", "name a group, too"), ("0:no-such-group", "has no group")],
)
def test_a_user_that_is_not_there_is_refused(given: str, words: str) -> None:
    with pytest.raises(StartError, match=words):
        worker_user.find(given)


def test_ones_own_user_is_accepted_and_changes_nothing(tmp_path: Path) -> None:
    assert worker_user.find(None) is None and worker_user.find(str(os.geteuid())) is None
    home = HomePaths(tmp_path)
    home.run_as_file.write_text("former 1 1\n")
    worker_user.settle(home, None, None)
    assert worker_user.recorded(home) is None and home.home.stat().st_mode & 0o077 == tmp_path.stat().st_mode & 0o077


def test_who_is_not_root_cannot_give_code_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert main(["serve", "--home", str(tmp_path / "home"), "--run-as", f"{UID}:{UID}"]) == 2
    assert "only root can start processes as another" in capsys.readouterr().err and not (tmp_path / "home").exists()


def test_code_of_jobs_that_run_elsewhere_is_not_run_beside_the_service(tmp_path: Path) -> None:
    """As on Slurm, whose nodes see the same files: neither the interpreter that a spec names, nor its hook."""
    seen = tmp_path / "seen"
    (tmp_path / "mine.py").write_text(f"open({str(seen)!r}, 'w')\ndef f(state, bucket): ...\nclass T: ...\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {seen}\n")
    python.chmod(0o755)
    spec = {"name": "a", "task": {"entrypoint": "mine:T"}, "code": {"path": str(tmp_path)}, "python": str(python)}
    spec |= {"hook": {"name": "custom", "hook": "mine:f"}, "world": {"device": "cpu"}}
    _, warnings, problems = resolve(JobSpec.model_validate(spec), Machine((), 2, trains=False))
    assert problems == [] and not seen.exists()
    assert {("/hook/hook", "hook-not-checked"), ("/python", "python-not-checked")} <= {
        (w.pointer, w.code) for w in warnings
    }


@pytest.mark.parametrize(("uid", "warned"), [(0, True), (1234, False)])
def test_root_without_a_user_for_jobs_is_warned_of(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, uid: int, warned: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    home.run_as_file.unlink()
    launchers = load(home, None)
    serve._say_as_whom(Settings(home.home), launchers)
    assert ("--run-as USER" in caplog.text) == warned
    found = doctor_jobs.user(home)
    assert (found.status == "warning", "--run-as USER" in str(found.cure)) == (warned, warned)
    home.run_as_file.write_text("jobs 1 2\n")
    found = doctor_jobs.user(home)
    assert (found.status, found.value) == ("ok", "jobs (user 1, group 2)")


@pytest.mark.parametrize("user", [None, USER])
def test_with_a_user_for_jobs_root_reads_nothing_that_was_not_allowed(tmp_path: Path, user: User | None) -> None:
    """Its copies can be read by that user, who may submit like everybody where no token is needed: the database, say."""
    spec = {"name": "a", "script": ["t.py"], "code": {"path": str(tmp_path)}, "world": {"device": "cpu"}}
    spec["start_from"] = {"path": str(tmp_path / "ratchet.db")}
    settings, report = serve.settled(Settings(tmp_path, user=user), tokens=False), Report()
    Roots(settings.home, settings.code_roots, settings.uri_roots).check(JobSpec.model_validate(spec), report)
    refused = [(p.pointer, p.code) for p in report.problems]
    named = [(pointer, "path-not-allowed") for pointer in ("/code/path", "/start_from/path")]
    assert refused == ([] if user is None else named)
    given = serve.settled(Settings(tmp_path, user=user, code_roots=(tmp_path,)), tokens=False)
    assert given.code_roots == (tmp_path,)


@pytest.mark.parametrize("url", [None, "postgresql://somewhere/else"])
def test_who_does_not_trust_jobs_lets_nobody_in_without_a_token(tmp_path: Path, url: str | None) -> None:
    """Their code reaches the port of this machine alone, too. Nothing is touched before the refusal."""
    settings = Settings(tmp_path / "home", url, user=USER)
    if url is None:
        with pytest.raises(StartError, match=r"--auth token.*token create"):
            serve.serve(serve.ServeOptions(settings))
        assert not settings.home.exists()
    else:
        serve._keep_jobs_out(settings, Listening())
    serve._keep_jobs_out(settings, Listening(auth="token"))
    serve._keep_jobs_out(Settings(tmp_path), Listening())


@AS_ROOT
def test_the_command_refuses_too_and_takes_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--home", str(tmp_path / "home"), "--run-as", f"{UID}:{UID}"]
    assert main(arguments) == 2
    assert "would be admin of the service: add --auth token" in capsys.readouterr().err
    monkeypatch.setenv("RATCHET_AUTH", "token")
    assert main([*arguments, "--host", "no.such.host.invalid"]) == 2  # gets as far as that
    assert "admin of the service" not in capsys.readouterr().err


@AS_ROOT
def test_roots_group_is_refused() -> None:
    with pytest.raises(StartError, match="root's own group"):
        worker_user.find(f"{UID}:0")


@AS_ROOT
def test_a_user_that_cannot_reach_the_jobs_is_refused_at_the_start(tmp_path: Path) -> None:
    """Temporary directories of tests are root's alone."""
    mask, groups = os.umask(0o022), os.getgroups()
    try:
        with pytest.raises(StartError, match=r"cannot reach .*mode o\+x"):
            worker_user.settle(HomePaths(tmp_path / "home"), USER, None)
    finally:
        os.umask(mask)
        os.setgroups(groups)


@AS_ROOT
def test_a_process_of_the_users_is_that_user_and_nothing_more() -> None:
    text = said(Confined(USER), {"HOME": "/root", "XDG_RUNTIME_DIR": "/run/user/0", "KEY": "kept"})
    found = status(text)
    assert found["Uid"] == found["Gid"] == [str(UID)] * 4 and found["Groups"] == [str(UID)]
    assert found["NoNewPrivs"] == ["1"] and {
        found[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    } == {"0" * 16}
    assert "HOME=/\n" in text and f"USER={UID}\n" in text and "KEY=kept" in text and "XDG" not in text


@AS_ROOT
def test_a_setuid_program_gives_root_to_nobody() -> None:
    with open_directory() as root:
        program = root / "python"
        source = Path("/usr/bin/id")
        program.write_bytes(source.read_bytes())
        program.chmod(0o4755)
        without = subprocess.run([str(program), "-u"], user=UID, group=UID, capture_output=True, text=True, check=True)
        if without.stdout.strip() != "0":
            pytest.skip(
                "setuid programs do nothing in this temporary directory (mounted nosuid): give another with TMPDIR"
            )
        assert said(Confined(USER), {}, script=f"{program} -u").strip() == str(UID)


@AS_ROOT
def test_what_is_asked_ends_with_its_whole_group_though_it_is_another_users() -> None:
    ask = "sleep 3600 & setsid sleep 3601 & sleep 3602"
    with pytest.raises(TimeoutError):
        children.ask(["/bin/sh", "-c", ask], {}, cwd="/", env=dict(os.environ), seconds=0.5, confined=Confined(USER))
    left = [pid for pid, _ in processes.values_of(children.MARK) if processes.is_of(pid, UID)]
    wait_for(lambda: all(processes.start_time(pid) is None for pid in left), "what was started to be gone", 10)


# --- the launcher ----------------------------------------------------------------------------------------------------------

AGENT = """
cd "$(dirname "$0")" && cat /proc/self/status > told && { cat "$0" > /dev/null && echo may-read >> told; }
sleep 3600
"""


def submitted(home: HomePaths) -> tuple[LocalLauncher, AttemptRef]:
    """An attempt whose agent is a shell, so that no interpreter need be reached by the user."""
    launcher = LocalLauncher(home, ("/bin/sh", "-c", AGENT), {"PATH": os.environ["PATH"]}, Confined(USER))
    plan = launcher.plan(launch(home))
    launcher.submit(plan)
    wait_for(lambda: "may-read" in files.tail(plan.ref.paths.root / "told", 10_000), "the agent to tell", 30)
    return launcher, plan.ref


@AS_ROOT
def test_an_agent_is_its_user_has_its_jobs_directory_and_can_be_proved_dead(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    told = status((ref.paths.root / "told").read_text())
    assert told["Uid"] == [str(UID)] * 4 and told["NoNewPrivs"] == ["1"]
    root = home.job(ref.job_id).root
    assert (root.stat().st_mode & 0o777, root.parent.stat().st_uid) == (0o700, 0)
    assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert ref.paths.launch_file.stat().st_mode & 0o777 == 0o600
    again = LocalLauncher(home, confined=Confined(USER))  # after a restart
    assert again.poll(ref).alive
    found = [pid for pid, _ in processes.values_of("RATCHET_ATTEMPT_DIR") if processes.is_of(pid, UID)]
    assert again.sweep(lambda names: names) == [] and found
    assert again.kill(ref)
    wait_for(lambda: launcher.kill(ref) == [], "the attempt to be dead", 10)


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


@AS_ROOT
def test_a_directory_of_before_is_handed_over_and_what_is_anothers_is_not(home: HomePaths) -> None:
    root = home.job(JOB).root
    (root / "work" / "deep").mkdir(parents=True)
    (root / "work" / "deep" / "own.pt").write_text("x")
    (root / "work" / "away").symlink_to(home.home / "secret")
    (home.home / "secret").write_text("x")
    file_owner.give(root, UID, UID)
    assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert (home.home / "secret").stat().st_uid == 0
    os.link(home.home / "secret", root / "work" / "linked")  # as that user can, where the system does not protect links
    with pytest.raises(PermissionError, match="linked, which belongs to user 0"):
        file_owner.give(root, UID + 1, UID + 1)
    assert (home.home / "secret").stat().st_uid == 0 and root.stat().st_uid == UID


@AS_ROOT
def test_no_link_of_users_code_leads_the_service_anywhere_that_the_user_could_not_go(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    secret, target = home.home / "ratchet.db", home.home / "made"
    secret.write_text("the service's own\n")
    secret.chmod(0o600)
    logs = ref.paths.log(0).parent
    as_user = {"user": UID, "group": UID, "check": True}
    subprocess.run(["/bin/sh", "-c", f"mkdir {logs}; ln -s {secret} {ref.paths.log(0)}"], **as_user)
    subprocess.run(["ln", "-s", str(target), str(ref.paths.fence_file)], **as_user)
    subprocess.run(["/bin/sh", "-c", f"rm {ref.paths.agent_log}; ln -s {secret} {ref.paths.agent_log}"], **as_user)
    assert list(read_lines(home.job(ref.job_id), LogFilter())) == []
    assert launcher.logs(ref, 1000) == ""
    files.fence(ref.paths)
    assert not ref.paths.fence_file.is_symlink() and ref.paths.fence_file.exists()
    assert not target.exists() and secret.read_text() == "the service's own\n"
    with file_owner.as_owner(ref.paths.root), file_owner.as_owner(ref.paths.root), pytest.raises(PermissionError):
        secret.read_text()
    assert secret.read_text()  # and outside it is the service again
    launcher.kill(ref)


@AS_ROOT
def test_users_code_that_locks_its_own_directory_is_ended_all_the_same(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    subprocess.run(["chmod", "000", str(ref.paths.root)], user=UID, group=UID, check=True)
    files.fence(ref.paths)
    assert launcher.kill(ref)
    wait_for(lambda: launcher.kill(ref) == [], "the attempt to be dead", 10)


@AS_ROOT
def test_users_code_that_names_another_process_as_its_agent_has_it_not_ended(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, ref = submitted(home)
    ended: list[int] = []
    monkeypatch.setattr(processes, "kill", lambda pid, number=signal.SIGKILL: ended.append(pid))
    with subprocess.Popen(["sleep", "60"]) as other:
        started = processes.start_time(other.pid)
        assert started is not None
        forged = AgentFile(pid=other.pid, start_time=started, host="here").model_dump_json()
        write = f"cat > {ref.paths.agent_file}; exec 9>{ref.paths.lock_file}; flock 9; exec sleep 60"
        with subprocess.Popen(["/bin/sh", "-c", write], user=UID, group=UID, stdin=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            holder.stdin.write(forged.encode())
            holder.stdin.close()
            wait_for(lambda: files.lock_is_held(ref.paths.lock_file), "the lock to be held", 10)
            launcher.stop(ref, 1.0)
            assert f"process {other.pid}" in launcher.kill(ref)  # the lock is held: nothing is proved
            assert other.pid not in ended and ended  # but the agent itself
            monkeypatch.undo()
            holder.send_signal(signal.SIGKILL)
        other.kill()


@AS_ROOT
def test_a_launch_file_that_leads_elsewhere_starts_nothing(home: HomePaths) -> None:
    launcher = LocalLauncher(home, ("/bin/true",), {}, Confined(USER))
    elsewhere = home.home / "elsewhere" / "attempts" / "0001"
    with pytest.raises(LaunchError, match="no attempt of the run directory"):
        launcher.submit(launcher.plan(launch(home).model_copy(update={"attempt_dir": str(elsewhere)})))
    assert not elsewhere.exists()


def test_what_a_starting_process_is_told_is_open_to_nobody_else() -> None:
    """It says whom to become: who could write it, by a link of his that the service follows to its own /proc, would be root."""
    with Confined(USER).command(["/bin/true"], {"KEY": "secret"}) as started:
        assert os.fstat(started.fds[0]).st_mode & 0o777 == 0


@AS_ROOT
def test_no_link_leads_to_what_the_service_has_open(home: HomePaths) -> None:
    launcher, ref = submitted(home)
    with Confined(USER).command(["/bin/true"], {"KEY": "secret"}) as started:
        for target in (f"/proc/self/fd/{started.fds[0]}", "/proc/self/maps"):
            script = f"ln -sf {target} {ref.paths.agent_log}"
            subprocess.run(["/bin/sh", "-c", script], user=UID, group=UID, check=True)
            assert launcher.logs(ref, 1000) == ""
            with pytest.raises(OSError, match=r"Too many levels of symbolic links"):
                launcher._start(launcher.plan(launch(home)), 0, {})
    launcher.kill(ref)


@AS_ROOT
def test_a_name_that_changes_hands_while_a_directory_is_handed_over_takes_nothing_with_it(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the former user's processes do between the look and the act."""
    root, secret, real = home.job(JOB).root, home.home / "secret", os.chown
    root.mkdir(parents=True)
    (root / "own.pt").write_text("x")
    secret.write_text("x")
    mine = (root / "own.pt").stat().st_ino

    def swapped(path: str, uid: int, gid: int, **more: Any) -> None:
        if os.stat(path, dir_fd=more.get("dir_fd")).st_ino == mine:
            (root / "own.pt").unlink()
            os.link(secret, root / "own.pt")
        real(path, uid, gid, **more)

    monkeypatch.setattr(os, "chown", swapped)
    file_owner.give(root, UID, UID)
    assert secret.stat().st_uid == 0


@pytest.mark.parametrize(("before", "after"), [(0o700, 0o700), (0o755, 0o755)])
def test_what_the_run_directory_kept_from_everybody_stays_so(before: int, after: int) -> None:
    """Copies of the database in a directory of their own: the run directory is opened, they are not."""
    with open_directory() as root:
        home = HomePaths(root / "home")
        (home.home / "copies").mkdir(parents=True)
        (home.home / "copies").chmod(0o755)
        home.home.chmod(before)
        worker_user._shut(home, None)
        worker_user._shut(home, None)  # the next start
        assert home.home.stat().st_mode & 0o777 == home.jobs.stat().st_mode & 0o777 == 0o711
        assert (home.home / "copies").stat().st_mode & 0o777 == after
