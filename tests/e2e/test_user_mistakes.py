"""The mistakes of the first hour, made as a person makes them: each ends in a message with its cure, where one looks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli import Cli
from tests.support.doctor import NOTHING_TESTED
from tests.support.fake_interpreters import (
    environment_hiding_packages,
    python_with_fake_answer,
    python_without_packages,
)
from tests.support.server import Server

DIGITS = "ratchet_worker.tasks.digits:DigitsTask"
BODY = "    def build(self, ctx): ...\n    def loss(self, model, batch): ...\n"
FILES = {
    "mine.py": f"class Mine:\n    def __init__(self, *, lr=0.1): ...\n{BODY}class Half:\n    def build(self, ctx): ...\n",
    "needs.py": f"import not_installed_here\nclass Mine:\n{BODY}",
    "train.py": "from ratchet_worker.session import Session\nimport not_installed_here\n",
    "late.py": f"import sys\nif sys.argv:\n    import not_installed_here\nclass Mine:\n{BODY}",
    "plain.py": "import os\nprint('rank', os.environ['RANK'])\n",
    "broken.py": "x = 1\ndef f(:\n",
}


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    (tmp_path / "code").mkdir()
    for name, text in FILES.items():
        (tmp_path / "code" / name).write_text(text)
    return Cli(server.home, tmp_path)


def write(cli: Cli, **more: Any) -> str:
    spec = {"name": "first", "code": {"path": "code"}, "world": {"device": "cpu"}, "resources": {"cpus_per_rank": 1}}
    given = {k: v for k, v in (spec | more).items() if v is not None}
    (cli.cwd / "job.yaml").write_text(yaml.safe_dump(given))
    return "job.yaml"


def refused(cli: Cli, *, code: int = 5, **more: Any) -> str:
    """What the terminal shows of a submission that is refused; nothing is queued by it."""
    result = cli("submit", write(cli, **more), "--wait", expect=code)
    assert result.text == "" and "Traceback" not in result.errors
    return result.errors


def task(entrypoint: str, **args: Any) -> dict[str, Any]:
    return {"entrypoint": entrypoint, "args": args}


def test_python_without_torch_is_refused_with_install_command(cli: Cli, tmp_path: Path) -> None:
    python = python_without_packages(tmp_path, "torch")
    said = refused(cli, task=task(DIGITS), python=str(python))
    assert f"{python} has no torch" in said and f"{python} -m pip install 'ratchet-train[worker]'" in said


@pytest.mark.parametrize(
    ("arguments", "hidden", "extra"),
    [(("serve",), "fastapi", "service"), (("agent", "launch.json"), "torch", "worker")],
)
def test_command_without_required_extra_names_the_extra_to_install(
    tmp_path: Path, arguments: tuple[str, ...], hidden: str, extra: str
) -> None:
    (tmp_path / "launch.json").write_text("{}")
    cli = Cli(tmp_path / "home", tmp_path)
    cli.environment |= environment_hiding_packages(tmp_path, hidden)
    said = cli(*arguments, expect=8).errors
    assert hidden in said and f"-m pip install 'ratchet-train[{extra}]'" in said


def test_torch_missing_at_rank_start_ends_the_job_as_user_error(cli: Cli, tmp_path: Path) -> None:
    gone = python_without_packages(tmp_path, "torch")
    python = python_with_fake_answer(tmp_path, f'exec {gone} "$@"')
    said = cli("submit", write(cli, task=task(DIGITS), python=str(python)), "--wait", expect=1)
    assert "has no torch" in said.errors and "-m pip install 'ratchet-train[worker]'" in said.errors
    assert [a["cause"] for a in cli("attempts", said.text.strip(), "--json").data] == ["user-error"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (task("mine.Mine"), "did you mean 'mine:Mine'?"),
        (task("mine.py"), "'package.module:ClassName'"),
        (task("mime:Mine"), "did you mean 'mine'?"),
        (task("mine:Mein"), "did you mean 'Mine'?"),
        (task("mine:Half"), "has no loss"),
        (task("mine:Mine", lrr=0.1), "did you mean 'lr'?"),
        (task("broken:Mine"), "broken.py, line 2"),
    ],
)
def test_wrong_entrypoint_is_refused_without_import(cli: Cli, given: dict[str, Any], says: str) -> None:
    assert says in refused(cli, task=given)


def test_missing_module_is_refused_with_install_command(cli: Cli) -> None:
    for what in ({"task": task("needs:Mine")}, {"script": ["train.py"]}):
        said = refused(cli, **what)
        assert "'not_installed_here'" in said and f"{sys.executable} -m pip install not_installed_here" in said


def test_missing_module_found_at_run_time_ends_job_at_first_attempt(cli: Cli) -> None:
    submitted = [cli("submit", write(cli, **what)) for what in ({"task": task("late:Mine")}, {"script": ["late.py"]})]
    assert all("[package-missing]" in done.errors for done in submitted)
    jobs = [done.text.strip() for done in submitted]
    for job in jobs:
        said = cli("wait", job, expect=1).errors
        assert "'not_installed_here'" in said and f"{sys.executable} -m pip install" in said
        assert [a["cause"] for a in cli("attempts", job, "--json").data] == ["user-error"]
        for command in ("get", "events", "attempts"):
            assert "not_installed_here" in cli(command, job).text


def test_script_without_session_runs_and_is_reported_unmanaged(cli: Cli) -> None:
    """At submission with what that means and where to read on; in the report of the second attempt."""
    done = cli("submit", write(cli, script=["plain.py"]), "--wait")
    assert "[unmanaged-script]" in done.errors and "has no Session" in done.errors and "docs/adoption.md" in done.errors
    assert "rank 0" in cli("logs", done.text.strip()).text
    assert "unmanaged" in cli("attempts", done.text.strip()).text + cli("events", done.text.strip()).text
    hook = refused(cli, script=["plain.py"], hook="powerSGD")
    assert "hook powerSGD would not be applied" in hook


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        ({"version": [3, 9, 18], "worker_error": "SyntaxError"}, "is Python 3.9.18, Ratchet needs 3.11 or newer"),
        ({"torch_version": "2.8.0+cu128"}, "has torch 2.8.0+cu128, Ratchet needs torch 2.9 or newer"),
        ({"worker_error": "ModuleNotFoundError: ratchet_worker"}, "-m pip install 'ratchet-train[worker]'"),
        ({"protocol": 7}, "has a Ratchet with protocol 7"),
    ],
)
def test_incompatible_python_is_refused(cli: Cli, tmp_path: Path, findings: dict[str, Any], says: str) -> None:
    python = python_with_fake_answer(tmp_path, **findings)
    said = refused(cli, task=task(DIGITS), python=str(python))
    assert says in said and str(python) in said


def test_untested_torch_version_is_warned_of_at_submission_and_in_attempts(cli: Cli, tmp_path: Path) -> None:
    """At submission, in the resume report, and below the attempts."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(NOTHING_TESTED)
    real = f'exec env PYTHONPATH={tmp_path / "shim"} {sys.executable} "$@"'
    python = python_with_fake_answer(tmp_path, real, torch_version="2.99.0+cpu")
    spec = write(cli, task=task(DIGITS, steps=4, width=8), python=str(python), determinism="strict")
    done = cli("submit", spec, "--wait")
    assert "[torch-untested]" in done.errors and "torch 2.99.0+cpu is not tested with this Ratchet" in done.errors
    job = done.text.strip()
    (attempt,) = cli("attempts", job, "--json").data
    (note,) = attempt["resume_report"]["notes"]
    assert "is not tested with this Ratchet" in note and f"attempt 1: {note}\n" in cli("attempts", job).errors


def test_path_without_python_interpreter_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert "there is no interpreter" in refused(cli, task=task(DIGITS), python="./bin/python3")
    assert "without bin/python, so it is not a virtual environment" in refused(
        cli, task=task(DIGITS), python=str(tmp_path)
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    assert "cannot import ratchet_worker" in refused(cli, task=task(DIGITS), python=str(tmp_path / "bare"))


def test_cuda_without_a_gpu_is_refused(cli: Cli) -> None:
    cuda = refused(cli, task=task(DIGITS), world={"device": "cuda"})
    assert "no GPU" in cuda and "set world.device to cpu or auto" in cuda
    nccl = refused(cli, task=task(DIGITS), ddp={"backend": "nccl"})
    assert "use backend gloo (or auto)" in nccl


def test_serve_on_used_directory_or_port_names_the_owner(server: Server, cli: Cli, tmp_path: Path) -> None:
    assert server.process is not None
    again = cli("serve", expect=2).errors
    assert f"pid {server.process.pid}" in again and server.url in again and "--home" in again
    port = server.url.rpartition(":")[2]
    other = cli("serve", "--home", str(tmp_path / "other"), "--port", port, expect=2).errors
    assert f"port {port}" in other and "--port 0" in other


SLIPS: list[tuple[str, str, int, str]] = [
    ("typo.yaml", "name: a\nscrpt: [train.py]\n", 5, "did you mean 'script'?"),
    ("tab.yaml", "name: a\n\ttask: x\n", 5, "not tabs"),
    ("empty.yaml", "", 5, "ratchet init"),
    ("text.yaml", "hello\n", 5, "ratchet init"),
    ("train.py", "print(1)\n", 5, "`ratchet init specs/train.py`"),
    ("name.yaml", "name: My Job\ntask: {entrypoint: 'a:b'}\n", 5, "lower-case letters"),
    ("both.yaml", "name: a\ntask: {entrypoint: 'a:b'}\nscript: [a.py]\n", 5, "both are set: remove one"),
    ("bare.yaml", "name: a\ntask: a:b\n", 5, 'task: {entrypoint: "my_module:MyTask"'),
    ("line.yaml", "name: a\nscript: train.py\ncode: {path: .}\n", 5, 'script: ["train.py"'),
    ("zero.yaml", "name: a\ntask: {entrypoint: 'a:b'}\ncheckpoint: {every_steps: 0}\n", 5, "auto or null"),
    ("hook.yaml", "name: a\ntask: {entrypoint: 'a:b'}\nhook: powersdg\n", 5, "did you mean 'powerSGD'?"),
]


def test_mistakes_in_a_spec_file_are_reported_with_correction(cli: Cli) -> None:
    for name, text, code, says in SLIPS:
        (cli.cwd / "specs").mkdir(exist_ok=True)
        (cli.cwd / "specs" / name).write_text(text)
        result = cli("submit", f"specs/{name}", expect=code)
        assert says in result.errors, (name, result)
    assert "name one of its files: specs/bare.yaml" in cli("submit", "specs", expect=3).errors
    assert "is one of these meant? specs/bare.yaml" in cli("submit", "specs/no.yaml", expect=3).errors
    assert "ratchet init" in cli("submit", "code", expect=3).errors


def test_mistakes_on_the_command_line_are_reported_with_correction(cli: Cli) -> None:
    assert "Did you mean 'logs'?" in cli("log", "x", expect=2).errors
    taken = cli(
        "submit", write(cli, task=task(DIGITS), hook={"name": "powersgd"}, world={"device": "cpu"}), "--dry-run"
    )
    assert "[hook-caution]" in taken.errors  # another case is no mistake
