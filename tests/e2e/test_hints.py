"""What the command line advises: every hint is given in a situation of its own, and its commands are typed as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ratchet_client.cli import error_hints
from ratchet_contract.api.roles import Role
from ratchet_service.db.engine import Database, sqlite_url
from tests.support.cli import Cli, Result
from tests.support.fork_server import LIBRARIES
from tests.support.server import Server, wait_for
from tests.support.tokens import make_token

AGENTS = LIBRARIES
WITHOUT_COMMAND = {"service-fault", "internal-error", "database-unavailable"}
"""They say to try again, and where more is told."""
SCRIPT = """import sys, time
from pathlib import Path
import torch
from ratchet_worker.session import Session

while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
session = Session()
model = session.wrap(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.register(optimizer=optimizer)
for step in session.steps(1_000_000):
    model(torch.ones(2, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


class Advised:
    """The command line of somebody who does what it says."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli

    def refused(self, code: str, *arguments: str) -> str:
        """What is said to a command that is refused with ``code``."""
        done = self.cli.run_without_check(*arguments)
        text = (error_hints._STRICT if "determinism is strict" in done.errors else error_hints._NEXT)[code]
        assert done.code != 0 and text.split("`")[0] in done.errors, (arguments, done)
        return done.errors

    def follow(self, said: str, **values: str) -> list[Result]:
        """Type each command that stands there, in order, with words in capitals replaced."""
        commands = re.findall(r"`(ratchet [^`]*)`", said)
        assert commands, said
        done = []
        for command in commands:
            for name, value in values.items():
                command = re.sub(rf"\b{name}\b", value, command)
            done.append(self.cli.run_without_check(*shlex.split(command)[1:], deadline=120))
            waited = command.startswith("ratchet wait") and "CANCELLED" in done[-1].errors  # by its code, too
            assert done[-1].code == 0 or waited, f"{command}: {done[-1]}"
        return done


@pytest.fixture
def told(server: Server, tmp_path: Path) -> Advised:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    spec = {
        "name": "hinted", "script": ["train.py", str(tmp_path / "go")], "code": {"path": "code"},
        "world": {"device": "cpu", "ranks_per_node": 2}, "resources": {"cpus_per_rank": 1},
        "checkpoint": {"every_steps": 20, "keep_last": 1000},
        "hook": {"name": "powerSGD", "matrix_approximation_rank": 1, "start_powerSGD_iter": 2},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    return Advised(Cli(server.home, tmp_path))


def test_hints_for_changing_a_job_work_as_printed(server: Server, told: Advised, tmp_path: Path) -> None:
    """Asked for all that it cannot do as it is: a strict job, then the fork that its hint makes."""
    cli = told.cli
    job = cli("submit", "job.yaml", "--set", "determinism=strict").text.strip()
    cli("suspend", job)
    cli("wait", job, "--until", "SUSPENDED")
    said = told.refused("not-running", "checkpoint", job)
    (tmp_path / "go").touch()
    cli("resume", job)
    assert "RUNNING" in told.follow(said)[-1].errors
    cli("checkpoint", job)
    cli("suspend", job)
    cli("wait", job, "--until", "SUSPENDED")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text(SCRIPT + "\n")
    for code, change in (("world-size-mismatch", ("--world", "1")), ("hook-mismatch", ("--hook", "allreduce"))):
        said = told.refused(code, "resume", job, *change)  # under strict determinism no leave helps
        cli("cancel", told.follow(said, N="1", NAME="allreduce")[0].text.strip())
    said = told.refused("code-mismatch", "resume", job, "--code", "other")
    fork = told.follow(said, DIR=str(tmp_path / "other"))[0].text.strip()
    cli("cancel", job)
    resumed, more = told.follow(told.refused("job-ended", "suspend", job))
    assert "resumes" in resumed.text + resumed.errors
    for one in (job, more.text.strip()):
        cli("cancel", one)

    def scheduled() -> list[int]:
        return [c["step"] for c in cli("checkpoints", "ls", fork, "--json").data if c["step"] % 20 == 0]

    step = str(wait_for(scheduled, "a scheduled checkpoint")[0])
    changes = {
        "from-step-needs-stop": ("--from-step", step),
        "code-needs-stop": ("--code", "code"),
        "policy-needs-stop": ("--on-hook-mismatch", "redistribute"),
        "world-needs-stop": ("--world", "1"),
        "hook-needs-stop": ("--hook", "allreduce"),
    }
    advice = {told.refused(code, "resume", fork, *change).partition("next: ")[2] for code, change in changes.items()}
    (said,) = advice
    told.follow(said)
    assert "`--on-hook-mismatch redistribute`" in told.refused("world-size-mismatch", "resume", fork, "--world", "1")
    said_of_hook = told.refused("hook-mismatch", "resume", fork, "--hook", "allreduce")
    assert "`--on-hook-mismatch redistribute` or `reset`" in said_of_hook
    allows = {"world-needs-stop": "redistribute", "hook-needs-stop": "reset"}
    for code, change in changes.items():  # the same commands for each, after which it is made
        told.follow(said)
        cli("resume", fork, *change, *(("--on-hook-mismatch", allows[code]) if code in allows else ()))
    cli("cancel", fork)


def test_hints_for_missing_objects_work_as_printed(server: Server, told: Advised, tmp_path: Path) -> None:
    cli = told.cli
    job = cli("submit", "job.yaml", "--idempotency-key", "one").text.strip()
    shows = {
        "job-not-found": ("get", "job-000000000000"),
        "attempt-not-found": ("logs", job, "--attempt", "77"),
        "checkpoint-not-found": ("checkpoints", "show", job, "step-000000000999.a0001"),
        "file-not-found": ("cp", f"{job}:nowhere.txt", "."),
        "hook-not-found": ("hooks", "nonesuch"),
        "wrong-phase": ("delete", job),
        "invalid-spec": ("submit", "job.yaml", "--set", "world.ranks_per_node=many"),
    }
    for code, arguments in shows.items():
        said = told.refused(code, *arguments)
        if code == "wrong-phase":
            cli("cancel", job)
            assert "CANCELLED" in told.follow(said)[-1].errors
        else:
            told.follow(said, FILE="job.yaml")
    said = told.refused("idempotency-key-reused", "submit", "job.yaml", "--name", "more", "--idempotency-key", "one")
    assert "another --idempotency-key" in said
    cli("cancel", cli("submit", "job.yaml", "--name", "more", "--idempotency-key", "two").text.strip())


def test_hints_for_tokens_work_as_printed(token_required_server: Server, tmp_path: Path) -> None:
    admin, ann = Advised(Cli(token_required_server.home, tmp_path)), Advised(Cli(token_required_server.home, tmp_path))
    database = Database(sqlite_url(token_required_server.paths.database))
    admin.cli.environment["RATCHET_TOKEN"] = make_token(database, "root", Role.ADMIN)
    database.dispose()

    def lent(*more: str) -> tuple[str, str]:
        made = admin.cli("token", "create", "--owner", "ann", "--role", "viewer", *more).text.strip()
        return made, made.split("_")[1]

    token, number = lent()
    said = ann.cli("list", expect=5).errors
    assert "`ratchet config set token`" in said
    assert token_required_server.url in ann.cli("config", "set", "token", stdin=f"{token}\n").errors
    ann.cli("config", "set", "server", token_required_server.url)
    ann.follow(ann.refused("not-allowed", "token", "create", "--owner", "root"))
    admin.cli("token", "revoke", number)
    said = ann.refused("token-revoked", "list")
    (again,) = admin.follow(said, NAME="ann")
    ann.cli("config", "set", "token", stdin=again.text)
    ann.cli("list")
    ann.follow(ann.cli("token", "revoke", "nonesuch", expect=3).errors)
    ann.cli.environment["RATCHET_TOKEN"] = f"rt_{'a' * 12}_{'b' * 43}"
    assert "RATCHET_TOKEN" in ann.follow(ann.refused("token-unknown", "list"))[0].text


def test_hint_for_missing_service_starts_one_as_printed(tmp_path: Path) -> None:
    cli = Cli(tmp_path, tmp_path)
    del cli.environment["RATCHET_HOME"]
    cli.environment["HOME"] = str(tmp_path)
    said = cli("--home", "my runs", "list", expect=6).errors
    (command,) = re.findall(r"`(ratchet serve[^`]*)`", said)
    with subprocess.Popen(cli.command(*shlex.split(command)[1:]), cwd=tmp_path, env=cli.environment) as service:
        try:
            wait_for((tmp_path / "my runs" / "service.json").exists, "the service to listen")
            wait_for(lambda: cli.run_without_check("--home", "my runs", "list").code == 0, "the service to answer")
        finally:
            service.terminate()


def test_every_error_hint_is_covered() -> None:
    here = Path(__file__).read_text()
    assert {
        code for code, text in error_hints._NEXT.items() if "`ratchet" not in text and "--" not in text
    } == WITHOUT_COMMAND
    assert [code for code in {*error_hints._NEXT, *error_hints._STRICT} if f'"{code}"' not in here] == []
