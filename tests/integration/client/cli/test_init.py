"""``ratchet init`` as a person types it; against a running service: tests/e2e/test_adoption_ladder.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_contract.processes import service_pointers
from tests.support.cli import Cli
from tests.support.scripted_server import problem, serving

LADDER = Path(__file__).parents[4] / "examples" / "adoption"
TRAIN = ("torchrun", "--nproc-per-node", "2", "train.py", "--epochs", "10", "--lr", "0.1")
HOOK = (
    "hook.name=powerSGD",
    "hook.matrix_approximation_rank=2",
    "hook.start_powerSGD_iter=10",
    "checkpoint.every_steps=22",
)
RUNGS = {"0_torchrun": (), "1_hooks": (), "2_session": HOOK, "3_task": HOOK}


@pytest.mark.parametrize("rung", RUNGS)
def test_init_generates_exactly_the_specs_of_the_ladder_examples(
    rung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(LADDER / rung / "train.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    sets = [word for pair in RUNGS[rung] for word in ("--set", pair)]
    done = CliRunner().invoke(app, ["init", "--print", "--name", f"digits-{rung[2:]}", *sets, *TRAIN])
    assert done.exit_code == 0, done.output
    assert done.stdout == (LADDER / rung / "train.yaml").read_text()


def test_init_marks_ranks_per_node_given_by_set_in_the_comment(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text("import ratchet\n")
    text = Cli(tmp_path / "home", tmp_path)("init", "--print", "--set", "world.ranks_per_node=2", "fit.py").text
    (world,) = [line for line in text.splitlines() if line.startswith("world:")]
    assert "ranks_per_node: 2" in world and "# --set. auto" in world


def test_init_without_a_service_suggests_commands_that_need_none(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text("import torch\ntorch.save({}, 'a.pt')\n")
    cli = Cli(tmp_path / "nothing", tmp_path)
    said = cli("init", "-o", "my job.yaml", "fit.py").errors
    assert said.splitlines()[-2:] == [
        "next: ratchet run 'my job.yaml'",
        "or, with a service: ratchet serve (in another terminal), then: ratchet submit 'my job.yaml' --follow",
    ]
    (tmp_path / "exact.py").write_text("from ratchet import Session\nwith Session() as s: ...\n")
    exact = cli("init", "exact.py").errors
    assert exact.splitlines()[-2] == "next: ratchet prove exact.yaml, then: ratchet run exact.yaml"
    both = cli("init", "--force", "--json", "--nproc-per-node", "3", "--standalone", "fit.py", "--lr", "1").data
    assert both["spec"]["world"]["ranks_per_node"] == 3 and both["spec"]["script"] == ["fit.py", "--lr", "1"]
    assert {note["code"] for note in both["found"]} >= {"unmanaged", "saves"} and "--standalone" in both["dropped"]
    assert both["file"] == str(tmp_path / "fit.yaml") and (tmp_path / "fit.yaml").is_file()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("status", "code", "of_spec"),
    [
        (422, "invalid-spec", True),
        (422, "python-not-found", True),
        (413, "too-many-files", True),
        (401, "token-revoked", False),
        (403, "not-allowed", False),
        (429, "too-many-requests", False),
        (500, "internal-error", False),
        (503, "busy", False),
    ],
)
def test_init_advises_to_correct_the_spec_only_if_the_service_refuses_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str, of_spec: bool
) -> None:
    (tmp_path / "fit.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    with serving(lambda *_: problem(status, code)) as server:
        done = CliRunner().invoke(app, ["--server", server.url, "init", "fit.py"])
    assert done.exit_code == 0 and f"told: {code}" in done.stderr
    assert ("next: correct fit.yaml, then: ratchet submit" in done.stderr) == of_spec
    assert ("the service would refuse this spec" in done.stderr) == of_spec
    assert ("the service has not checked this spec" in done.stderr) != of_spec
    assert "ratchet submit fit.yaml --follow" in done.stderr.splitlines()[-1]


def test_init_with_several_services_does_not_blame_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fit.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RATCHET_HOME", raising=False)
    monkeypatch.delenv("RATCHET_SERVER", raising=False)
    homes = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(service_pointers, "running_services", lambda: homes)
    said = CliRunner().invoke(app, ["init", "fit.py"]).stderr
    assert "the service has not checked this spec: several services run" in said and "correct fit.yaml" not in said


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("python", "/opt/venv", "/opt/venv"),
        ("env.A", "b", "b"),
        ("code.path", "..", ".."),
        ("code.include", "[data]", ["data"]),
        ("task.args.lr", "0.00001", 0.00001),
        ("labels.mood", "😀", "😀"),
        ("policy.max_failures", "0", 0),
        ("checkpoint.every_steps", "7", 7),
        ("resources.cpus_per_rank", "2", 2),
    ],
)
def test_init_set_writes_every_kind_of_spec_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, wanted: str | float
) -> None:
    """What the file says is what was set, and it is a spec."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    text = "class Mine:\n    def __init__(self, lr=0.1): ...\n    def build(self, ctx): ...\n    def loss(self, m, b): ...\n"
    Path("mine.py").write_text(text)
    done = CliRunner().invoke(app, ["init", "--set", f"{key}={value}", "mine.py"])
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(Path("mine.yaml").read_text())
    for part in key.split("."):
        found = found[part]
    assert found == wanted and type(found) is type(wanted)


def test_init_set_refuses_unsupported_keys_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fit.py").write_text("import torch\n")
    (tmp_path / "other").mkdir()
    wrong = {
        "python=3": "--set python: name an interpreter",
        "code=x": "--code DIR",
        "code.source=nodes": "--code DIR",
        "code.path=other": "is not below --code other",
        "task.args.lr=1": "/task/entrypoint",
    }
    for given, why in wrong.items():
        done = CliRunner().invoke(app, ["init", "--set", given, "fit.py"])
        assert done.exit_code == 5 and why in done.stderr and "Traceback" not in done.output, (given, done.output)
    assert not list(tmp_path.glob("*.yaml"))


def test_init_with_wrong_arguments_exits_with_error_code_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fit.py").write_text("import torch\n")

    def refused(*words: str, code: int) -> str:
        done = CliRunner().invoke(app, ["init", *words])
        assert done.exit_code == code and not done.stdout, done.output
        return done.stderr

    assert "--nnodes=2" in refused("torchrun", "--nnodes", "2", "fit.py", code=5)
    assert "no such file: gone.py" in refused("gone.py", code=3)
    assert f"{tmp_path / 'gone'}: No such file or directory" in refused("-o", "gone/x.yaml", "fit.py", code=5)
    assert "/name" in refused("--name", "Not A Name", "fit.py", code=5)
    assert "ratchet's own options come first" in refused("--nproc-per-node", "2", "--force", "fit.py", code=5)
    assert not list(tmp_path.glob("*.yaml"))
