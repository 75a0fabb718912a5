"""Users' code under a user of its own: who that may be, who may start it, and what its processes are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import procfs
from ratchet_contract.spec.job import JobSpec
from ratchet_service.__main__ import main
from ratchet_service.commands import doctor_jobs, serve
from ratchet_service.config.network import Listening
from ratchet_service.config.settings import Settings
from ratchet_service.errors import StartError
from ratchet_service.isolation import run_as, subprocess_query
from ratchet_service.isolation.sandbox import Sandbox, User
from ratchet_service.launchers.registry import load
from ratchet_service.preflight.paths import Roots
from ratchet_service.preflight.report import Report
from ratchet_service.preflight.resolve import resolve
from ratchet_service.scheduling.machine import Machine
from tests.support.run_as import AS_ROOT, UID, USER, open_directory, open_home, parse_proc_status, shell_output
from tests.support.server import wait_for


@pytest.fixture
def home() -> Iterator[HomePaths]:
    with open_home() as paths:
        yield paths


def test_sandbox_command_keeps_user_variables_out_of_roots_environment(tmp_path: Path) -> None:
    """A library to preload would run as whoever the process is before it becomes the user."""
    with Sandbox(USER).command(["/bin/true"], {"LD_PRELOAD": "/evil.so", "KEY": "secret"}) as started:
        assert "LD_PRELOAD" not in started.env and "secret" not in str(started)
        assert json.loads(os.pread(started.fds[0], 1 << 16, 0))["environ"]["LD_PRELOAD"] == "/evil.so"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no-such-user", "has no user"),
        ("4294967295", "has no user"),  # the number that means "no change" to setresuid(2)
        ("4000000", "name a group, too"),
        ("1078400003", "name a group, too"),
        ("0:no-such-group", "has no group"),
    ],
)
def test_run_as_with_an_unknown_user_or_group_is_refused(given: str, words: str) -> None:
    with pytest.raises(StartError, match=words):
        run_as.parse_user(given)


def test_run_as_with_the_current_user_changes_nothing(tmp_path: Path) -> None:
    assert run_as.parse_user(None) is None and run_as.parse_user(str(os.geteuid())) is None
    home = HomePaths(tmp_path)
    home.run_as_file.write_text("former 1 1\n")
    run_as.prepare_run_directory(home, None, None)
    assert run_as.recorded_user(home) is None and home.home.stat().st_mode & 0o077 == tmp_path.stat().st_mode & 0o077


def test_run_as_without_root_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert main(["serve", "--home", str(tmp_path / "home"), "--run-as", f"{UID}:{UID}"]) == 2
    assert "only root can start processes as another" in capsys.readouterr().err and not (tmp_path / "home").exists()


def test_resolve_for_remote_launchers_does_not_run_users_code(tmp_path: Path) -> None:
    """As on Slurm, whose nodes see the same files: neither the interpreter that a spec names, nor its hook."""
    seen = tmp_path / "seen"
    (tmp_path / "mine.py").write_text(f"open({str(seen)!r}, 'w')\ndef f(state, bucket): ...\nclass T: ...\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {seen}\n")
    python.chmod(0o755)
    spec = {"name": "a", "task": {"entrypoint": "mine:T"}, "code": {"path": str(tmp_path)}, "python": str(python)}
    spec |= {"hook": {"name": "custom", "hook": "mine:f"}, "world": {"device": "cpu"}}
    _, warnings, problems = resolve(JobSpec.model_validate(spec), Machine((), 2, runs_jobs=False))
    assert problems == [] and not seen.exists()
    assert {("/hook/hook", "hook-not-checked"), ("/python", "python-not-checked")} <= {
        (w.pointer, w.code) for w in warnings
    }


@pytest.mark.parametrize(("uid", "warned"), [(0, True), (1234, False)])
def test_serving_as_root_without_run_as_is_warned_about(
    home: HomePaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, uid: int, warned: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    home.run_as_file.unlink()
    launchers = load(home, None)
    serve._log_job_user(Settings(home.home), launchers)
    assert ("--run-as USER" in caplog.text) == warned
    found = doctor_jobs.check_job_user(home)
    assert (found.status == "warning", "--run-as USER" in str(found.cure)) == (warned, warned)
    home.run_as_file.write_text("jobs 1 2\n")
    found = doctor_jobs.check_job_user(home)
    assert (found.status, found.value) == ("ok", "jobs (user 1, group 2)")


@pytest.mark.parametrize("user", [None, USER])
def test_run_as_defaults_to_no_allowed_code_roots(tmp_path: Path, user: User | None) -> None:
    """Its copies can be read by that user, who may submit like everybody where no token is needed: the database, say."""
    spec = {"name": "a", "script": ["t.py"], "code": {"path": str(tmp_path)}, "world": {"device": "cpu"}}
    spec["start_from"] = {"path": str(tmp_path / "ratchet.db")}
    settings, report = serve.with_access_defaults(Settings(tmp_path, user=user), tokens_required=False), Report()
    Roots(settings.home, settings.code_roots, settings.uri_roots).check(JobSpec.model_validate(spec), report)
    refused = [(p.pointer, p.code) for p in report.problems]
    named = [(pointer, "path-not-allowed") for pointer in ("/code/path", "/start_from/path")]
    assert refused == ([] if user is None else named)
    given = serve.with_access_defaults(Settings(tmp_path, user=user, code_roots=(tmp_path,)), tokens_required=False)
    assert given.code_roots == (tmp_path,)


@pytest.mark.parametrize("url", [None, "postgresql://somewhere/else"])
def test_serve_with_run_as_requires_token_authentication(tmp_path: Path, url: str | None) -> None:
    """Their code reaches the port of this machine alone, too. Nothing is touched before the refusal."""
    settings = Settings(tmp_path / "home", url, user=USER)
    if url is None:
        with pytest.raises(StartError, match=r"--auth token.*token create"):
            serve.serve(serve.ServeOptions(settings))
        assert not settings.home.exists()
    else:
        serve._require_tokens_with_run_as(settings, Listening())
    serve._require_tokens_with_run_as(settings, Listening(auth="token"))
    serve._require_tokens_with_run_as(Settings(tmp_path), Listening())


@AS_ROOT
def test_serve_command_with_run_as_requires_tokens_by_option_or_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--home", str(tmp_path / "home"), "--run-as", f"{UID}:{UID}"]
    monkeypatch.setattr(run_as, "restrict_process", lambda: None)  # this one is the tests'
    assert main(arguments) == 2
    assert "would have the role admin: add --auth token" in capsys.readouterr().err
    monkeypatch.setenv("RATCHET_AUTH", "token")
    assert main([*arguments, "--host", "no.such.host.invalid"]) == 2  # gets as far as that
    assert "admin of the service" not in capsys.readouterr().err


@AS_ROOT
def test_run_as_accepts_the_large_ids_of_directory_services() -> None:
    assert run_as.parse_user("1078400003:4294967294") == User(1078400003, 4294967294, (4294967294,), "/", "1078400003")


@AS_ROOT
def test_run_as_with_roots_group_is_refused() -> None:
    with pytest.raises(StartError, match="root's own group"):
        run_as.parse_user(f"{UID}:0")


@AS_ROOT
def test_run_as_user_without_access_to_the_home_is_refused_at_start(tmp_path: Path) -> None:
    """Temporary directories of tests are root's alone."""
    mask, groups = os.umask(0o022), os.getgroups()
    try:
        run_as.restrict_process()
        with pytest.raises(StartError, match=r"cannot reach .* is not searchable by others: chmod o\+x /"):
            run_as.prepare_run_directory(HomePaths(tmp_path / "home"), USER, None)
    finally:
        os.umask(mask)
        os.setgroups(groups)


@AS_ROOT
def test_run_as_with_an_interpreter_that_hangs_is_refused_in_time(
    home: HomePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(run_as, "_CHECK_SECONDS", 0.1)
    mask, groups = os.umask(0o022), os.getgroups()
    try:
        run_as.restrict_process()
        with pytest.raises(StartError, match=r"did not answer within 0\.1 s"):
            run_as.prepare_run_directory(home, USER, None)
    finally:
        os.umask(mask)
        os.setgroups(groups)


@AS_ROOT
@pytest.mark.parametrize("url", ["sqlite:///{}", "sqlite+pysqlite:///{}", "sqlite:///{}?timeout=3"])
def test_database_file_outside_the_run_directory_is_closed_to_the_jobs_user(
    home: HomePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(run_as, "_is_process_restricted", lambda: True)  # this one is the tests'
    monkeypatch.setattr(run_as, "_check_user", lambda *_: None)
    place = tmp_path / "x.db"
    for end in ("", "-wal"):
        place.with_name(place.name + end).touch(0o644)
    serve.prepare_job_user(Settings(home=home.home, database_url=url.format(place), user=USER))
    assert {path.stat().st_mode & 0o777 for path in (place, place.with_name("x.db-wal"))} == {0o600}


@AS_ROOT
def test_prepare_run_directory_refuses_an_unrestricted_process_unchanged(tmp_path: Path) -> None:
    """Whoever serves within a program of their own keeps its umask and groups."""
    mask, groups = os.umask(0o022), os.getgroups()
    try:
        os.setgroups([0])
        for change in (lambda: None, lambda: os.umask(0o077)):
            change()
            with pytest.raises(StartError, match=r"supplementary groups.*restrict_process\(\)"):
                run_as.prepare_run_directory(HomePaths(tmp_path / "home"), USER, None)
        assert os.getgroups() == [0] and not (tmp_path / "home").exists()
        os.setgroups([])
        os.umask(0o022)
        with pytest.raises(StartError, match="lets others read"):
            run_as.prepare_run_directory(HomePaths(tmp_path / "home"), USER, None)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(mask)
        os.setgroups(groups)


@AS_ROOT
def test_sandboxed_process_has_only_the_users_ids_and_no_capabilities() -> None:
    text = shell_output(Sandbox(USER), {"HOME": "/root", "XDG_RUNTIME_DIR": "/run/user/0", "KEY": "kept"})
    found = parse_proc_status(text)
    assert found["Uid"] == found["Gid"] == [str(UID)] * 4 and found["Groups"] == [str(UID)]
    assert found["NoNewPrivs"] == ["1"] and {
        found[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    } == {"0" * 16}
    assert "HOME=/\n" in text and f"USER={UID}\n" in text and "KEY=kept" in text and "XDG" not in text


@AS_ROOT
def test_sandboxed_setuid_program_does_not_gain_root() -> None:
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
        assert shell_output(Sandbox(USER), {}, script=f"{program} -u").strip() == str(UID)


@AS_ROOT
def test_timed_out_query_kills_the_sandboxed_process_group() -> None:
    ask = "sleep 3600 & setsid sleep 3601 & sleep 3602"
    with pytest.raises(TimeoutError):
        subprocess_query.query_process(
            ["/bin/sh", "-c", ask], {}, cwd="/", env=dict(os.environ), timeout_seconds=0.5, sandbox=Sandbox(USER)
        )
    left = [
        pid for pid, _ in procfs.processes_with_variable(subprocess_query.MARKER_VARIABLE) if procfs.runs_as(pid, UID)
    ]
    wait_for(lambda: all(procfs.start_time(pid) is None for pid in left), "what was started to be gone", 10)
