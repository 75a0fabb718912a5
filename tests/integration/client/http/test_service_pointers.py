"""``ratchet`` finds a running service of the same user from any directory, and says which; another user's is never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ratchet_client.cli.doctor.network import service as doctor_service
from ratchet_client.cli.doctor.throwaway import temporary_service
from ratchet_client.cli.shared.options import Settings
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import service_pointers
from tests.support.cli import EXECUTABLE, FORKS, Result
from tests.support.fork_server import SERVICES, Program
from tests.support.forked_cli import import_environment
from tests.support.server import wait_for


class User:
    """Somebody with a home directory that is read-only."""

    def __init__(self, place: Path, runtime: Path) -> None:
        self.place = place
        home = self.directory("home")
        home.chmod(0o500)
        own = {"COLUMNS": "200", "HOME": str(home), "XDG_RUNTIME_DIR": str(runtime)}
        self.environment = {**import_environment(os.environ), **own}

    def directory(self, name: str) -> Path:
        (self.place / name).mkdir(exist_ok=True)
        return self.place / name

    @contextmanager
    def serving(self, name: str, *, command: bool = False) -> Iterator[subprocess.Popen[bytes] | Program]:
        """The service in that directory; ``command``: started by ``ratchet serve``, and not forked."""
        directory = self.directory(name)
        output = directory / "log"
        with output.open("wb") as log:
            if command:
                service: subprocess.Popen[bytes] | Program = subprocess.Popen(
                    [str(EXECUTABLE), "serve", "--no-reconciler"],
                    cwd=directory,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                )
            else:
                words = [sys.executable, "-P", "-m", "ratchet_service", "serve", "--home", str(directory / ".ratchet")]
                service = SERVICES.start([*words, "--no-reconciler"], log.fileno(), env=self.environment, cwd=directory)
        try:
            # This line comes after service.json and the pointer.
            wait_for(lambda: "listening on" in output.read_text() or service.poll() is not None, "the service to start")
            assert service.poll() is None, output.read_text()
            yield service
        finally:
            service.terminate()
            service.wait(20)

    def __call__(self, name: str, *arguments: str) -> Result:
        """``ratchet ...`` in that directory."""
        assert FORKS.can_fork(self.environment)
        return Result(*FORKS.run(arguments, cwd=self.directory(name), env=self.environment, stdin="", deadline=60))


@pytest.fixture
def user(tmp_path: Path) -> User:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    return User(tmp_path, runtime)


def pointers(user: User) -> list[Path]:
    return sorted(Path(user.environment["XDG_RUNTIME_DIR"]).glob("ratchet/*"))


def test_cli_finds_a_running_service_from_another_directory(user: User) -> None:
    with user.serving("mine", command=True):
        home = user.place / "mine" / ".ratchet"
        found = user("elsewhere", "list")
        assert (found.code, found.errors.count(str(home))) == (0, 1), found
        assert user("mine", "list").errors.count(str(home)) == 0, "its own run directory needs no word"
        shown = json.loads(user("elsewhere", "config", "--json").text)
        assert shown["home"] == {"value": str(home), "source": "the running service"}
        assert shown["server"]["value"] == json.loads(HomePaths(home).service_file.read_text())["url"]
        assert json.loads(pointers(user)[0].read_text())["home"] == str(home) and len(pointers(user)) == 1
        python = "import ratchet_client as r; print(r.RatchetClient().ready())"
        done = subprocess.run(
            [sys.executable, "-c", python], cwd=user.directory("elsewhere"), env=user.environment, capture_output=True
        )
        assert done.stdout == b"True\n", done
    assert pointers(user) == []
    gone = user("elsewhere", "list")
    assert gone.code == 6 and str(user.place / "elsewhere" / ".ratchet") in gone.errors


def test_cli_with_two_services_uses_only_the_own_or_the_specified_one(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    with user.serving("one"), user.serving("two"):
        asked = user("elsewhere", "list")
        assert asked.code == 5 and "several services run" in asked.errors, asked
        for name in ("one", "two"):
            home = str(user.place / name / ".ratchet")
            assert f"--home {home}" in asked.errors
            assert json.loads(user(name, "config", "--json").text)["home"]["value"] == home
            assert user("elsewhere", "--home", home, "list").code == 0
            url = json.loads(HomePaths(Path(home)).service_file.read_text())["url"]
            assert user("elsewhere", "--server", url, "list").code == 0
        shown = json.loads(user("elsewhere", "config", "--json").text)["server"]
        assert shown["value"] is None and "several services run" in shown["source"]
        monkeypatch.setenv("XDG_RUNTIME_DIR", user.environment["XDG_RUNTIME_DIR"])
        monkeypatch.delenv("RATCHET_HOME", raising=False)
        monkeypatch.chdir(user.place)
        (row,) = doctor_service(Settings(None, None))
        assert (row.status, row.value) == ("not-checked", "several run")


def test_killed_service_is_not_found_and_the_next_removes_its_pointer(user: User) -> None:
    with user.serving("killed") as service:
        service.kill()
        service.wait(10)
        assert len(pointers(user)) == 1, "it had no time to remove it"
        gone = user("elsewhere", "list")
        assert gone.code == 6 and f"`ratchet serve --home {user.place / 'killed' / '.ratchet'}`" in gone.errors
        there = user("killed", "list")
        assert there.code == 6 and f"(pid {service.pid}) has ended: start it with" in there.errors
        with user.serving("other"):
            home = str(user.place / "other" / ".ratchet")
            assert [json.loads(p.read_text())["home"] for p in pointers(user)] == [home]
            assert user("elsewhere", "list").code == 0
            stays = user("killed", "list")
            assert stays.code == 6 and f"--home {home}" in stays.errors, "its jobs are not the other's"


def test_cli_does_not_replace_an_ended_service_with_that_of_another_home(user: User) -> None:
    with user.serving("mine"):
        pass
    with user.serving("other"):
        stays = user("mine", "cancel", "a-name-that-both-may-have")
        assert stays.code == 6 and f"no service is running for the run directory {user.place / 'mine'}" in stays.errors
        assert f"or use the one that runs: --home {user.place / 'other' / '.ratchet'}" in stays.errors


def test_cli_without_a_service_names_the_run_directories_of_ratchet_run(user: User) -> None:
    (user.place / "mine" / ".ratchet" / "run").mkdir(parents=True)
    assert "no service is running" in user("mine", "list").errors
    (user.place / "mine" / ".ratchet" / "run" / "train-0123").mkdir()
    errors = user("mine", "list").errors
    assert "`ratchet serve --home " + str(user.place / "mine" / ".ratchet" / "run" / "train-0123") + "`" in errors, (
        errors
    )


def test_throw_away_service_writes_no_pointer(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", user.environment["XDG_RUNTIME_DIR"])
    with temporary_service(user.directory("elsewhere") / ".ratchet") as (client, _):
        assert client.ready() and pointers(user) == []


def test_service_pointer_with_a_reused_pid_or_damaged_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = service_pointers.create_pointer(tmp_path / "home")
    assert service_pointers.running_services() == [tmp_path / "home"]
    path.write_text(path.read_text().replace('"start_time":', '"start_time":1'))
    assert service_pointers.running_services() == []
    path.write_text("{")
    assert service_pointers.running_services() == [], "a damaged one counts for nothing"
    service_pointers.remove_pointer(path)
    assert path.exists(), "and is nobody's to remove"


@pytest.mark.parametrize("how", ["others may write", "a link", "another user's"])
def test_service_pointers_in_an_untrusted_directory_are_ignored(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    service_pointers.create_pointer(tmp_path / "home")
    directory = service_pointers.pointers_directory()
    assert directory == tmp_path / "ratchet" and service_pointers.running_services() != []
    if how == "others may write":
        directory.chmod(0o777)
    elif how == "a link":
        directory.rename(tmp_path / "real")
        directory.symlink_to(tmp_path / "real")
    elif os.geteuid() == 0:
        os.chown(directory, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        monkeypatch.setattr(service_pointers, "pointers_directory", lambda: directory)
    assert service_pointers.running_services() == []
    with pytest.raises(OSError, match=r"belongs to another user, or is writable by others|File exists"):
        service_pointers.create_pointer(tmp_path / "home")


@pytest.mark.parametrize("runtime", ["", "relative", "/nowhere"])
def test_service_pointers_without_xdg_runtime_dir_use_the_fallback_directory(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    user = os.geteuid()
    own = Path(f"/run/user/{user}")
    expected = own / "ratchet" if own.is_dir() else Path(f"/tmp/ratchet-{user}")
    assert service_pointers.pointers_directory() == expected


def test_service_runs_without_home_variable_and_pointer_directory(user: User) -> None:
    """As in a container."""
    (Path(user.environment["XDG_RUNTIME_DIR"]) / "ratchet").write_text("in the way")
    del user.environment["HOME"]
    with user.serving("mine"):
        assert user("mine", "list").code == 0
        assert user("elsewhere", "list").code == 6
        said = (user.place / "mine" / "log").read_text()
        assert said.count("cannot be found from other directories") == 1, said
