"""Users' code under a user of its own: who that may be, who may start it, and what its processes are."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_service import children, doctor_jobs, serve, worker_user
from ratchet_service.__main__ import main
from ratchet_service.confined import Confined, User
from ratchet_service.launchers import processes
from ratchet_service.launchers.table import load
from ratchet_service.listening import Listening, StartError
from ratchet_service.machine import Machine
from ratchet_service.preflight import resolve
from ratchet_service.preflight_report import Report
from ratchet_service.roots import Roots
from ratchet_service.settings import Settings
from tests.support.run_as import AS_ROOT, UID, USER, open_directory, open_home, said, status
from tests.support.server import wait_for


@pytest.fixture
def home() -> Iterator[HomePaths]:
    with open_home() as paths:
        yield paths


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
    monkeypatch.setattr(worker_user, "own_process", lambda: None)  # this one is the tests'
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
        worker_user.own_process()
        with pytest.raises(StartError, match=r"cannot reach .* lets others not through: chmod o\+x /"):
            worker_user.settle(HomePaths(tmp_path / "home"), USER, None)
    finally:
        os.umask(mask)
        os.setgroups(groups)


@AS_ROOT
def test_a_call_changes_nothing_of_the_process_and_refuses_one_that_would_read_as_root(tmp_path: Path) -> None:
    """Whoever serves within a program of their own keeps its umask and groups."""
    mask, groups = os.umask(0o022), os.getgroups()
    try:
        os.setgroups([0])
        for change in (lambda: None, lambda: os.umask(0o077)):
            change()
            with pytest.raises(StartError, match=r"groups of its own.*own_process\(\)"):
                worker_user.settle(HomePaths(tmp_path / "home"), USER, None)
        assert os.getgroups() == [0] and not (tmp_path / "home").exists()
        os.setgroups([])
        os.umask(0o022)
        with pytest.raises(StartError, match="others may read"):
            worker_user.settle(HomePaths(tmp_path / "home"), USER, None)
        assert os.umask(0o022) == 0o022
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
