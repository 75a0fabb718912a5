"""ratchet-hooks as a wheel of its own: by itself beside torch and numpy, and with ratchet-train, which requires it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

from ratchet_contract.version import RATCHET_VERSION
from tests.support.docs import ROOT, blocks
from tests.support.full_matrix import full
from tests.support.server import wait_for
from tests.support.torchrun import Torchrun
from tests.support.virtual_environments import environment_with_requirements

pytestmark = pytest.mark.slow
PIP = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
PIP |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
PIP |= {"PIP_NO_BUILD_ISOLATION": "0"}  # hatchling is there
STEPS, EVERY = 1000, 100
ENOUGH = 3 * EVERY
"""Steps for a test."""


def pip(python: str | Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", *arguments], cwd=ROOT, env=PIP, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(python: Path, program: str) -> str:
    """What a program prints there, with no directory of this repository on its path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-P", "-c", program], cwd="/", env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both, built as the quick start says."""
    folder = tmp_path_factory.mktemp("wheels")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), ".", "./hooks")
    return folder


@pytest.fixture(scope="module")
def alone(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch, numpy, what these need, and ratchet-hooks."""
    python = environment_with_requirements(tmp_path_factory.mktemp("alone"), ["torch", "numpy", "pip"])
    pip(python, "install", "--find-links", str(wheels), "ratchet-hooks[torch]")
    return python


def wheel(folder: Path, name: str) -> tuple[Distribution, set[str]]:
    """A wheel's metadata, and the names of its files."""
    (file,) = folder.glob(f"{name}-*.whl")
    archive = ZipFile(file)
    (info,) = (entry for entry in ZipPath(archive).iterdir() if entry.name.endswith(".dist-info"))
    return PathDistribution(info), {entry for entry in archive.namelist() if not entry.endswith("/")}  # type: ignore[arg-type]


def test_wheels_have_one_version_and_no_common_file(wheels: Path) -> None:
    hooks, theirs = wheel(wheels, "ratchet_hooks")
    train, ours = wheel(wheels, "ratchet_train")
    assert hooks.version == train.version == RATCHET_VERSION and not theirs & ours
    modules = {str(path.relative_to(ROOT / "hooks")) for path in (ROOT / "hooks").rglob("*.py")}
    assert modules | {"ratchet_hooks/py.typed"} == {name for name in theirs if ".dist-info/" not in name}
    assert {name.partition("/")[2] for name in theirs if "LICENSE" in name} == {"licenses/LICENSE"}
    assert (hooks.read_text("licenses/LICENSE") or "") == (ROOT / "LICENSE").read_text()
    assert hooks.metadata.get_payload() == (ROOT / "hooks" / "README.md").read_text()  # type: ignore[attr-defined]
    assert {line for line in train.requires or () if "ratchet-hooks" in line} == {f"ratchet-hooks=={RATCHET_VERSION}"}
    asked = {line.partition(";")[0].strip() for line in train.requires or () if line.endswith("extra == 'worker'")}
    assert {line.partition(";")[0].strip() for line in hooks.requires or ()} == {
        line for line in asked if line.startswith(("torch", "numpy"))
    }


def test_hooks_modules_import_with_torch_and_numpy_only(alone: Path) -> None:
    program = """
import importlib, json, pkgutil, ratchet_hooks
from importlib.util import find_spec
names = [m.name for m in pkgutil.walk_packages(ratchet_hooks.__path__, "ratchet_hooks.") if "integrations." not in m.name]
for name in names: importlib.import_module(name)
from ratchet_hooks import capture, register, restore
absent = ["pydantic", "safetensors", "xxhash", "ratchet_contract", "ratchet"]
print(json.dumps([ratchet_hooks.__file__, len(names), [name for name in absent if find_spec(name)]]))
"""
    place, count, found = json.loads(run(alone, program))
    assert Path(place).is_relative_to(alone.parents[1]) and count > 40 and found == []


@pytest.fixture
def runs(alone: Path, tmp_path: Path) -> Iterator[list[Torchrun]]:
    """The README's example under torchrun, twice: undisturbed where the tests run, and where ratchet-hooks is alone."""
    (example,) = (block for block in blocks(ROOT / "hooks" / "README.md") if block.language == "python")
    assert f"range(int(start), {STEPS})" in example.text and f"% {EVERY} == 0" in example.text
    started = []
    for name, python in (("whole", sys.executable), ("killed", str(alone))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(example.text.replace(f"{STEPS})", f"{ENOUGH})"))
        started.append(Torchrun(["train.py"], tmp_path / name, python))
    yield started
    for one in started:
        one.close()


@full
def test_readme_example_killed_under_torchrun_resumes_exactly(runs: list[Torchrun]) -> None:
    whole, killed = runs
    folder = killed.output.parent
    saved = [folder / f"rank-{rank}" / f"{EVERY}.safetensors" for rank in range(2)]
    wait_for(lambda: all(file.exists() for file in saved), "a checkpoint of both ranks", 150, 0.002)
    killed.kill(1)
    last = [f"rank-{rank}/{ENOUGH}.safetensors" for rank in range(2)]
    assert not any((folder / name).exists() for name in last), "it was over before the kill"
    whole.wait(), killed.wait()
    pairs = [[(run.output.parent / name).read_bytes() for run in runs] for name in last]
    assert all(one == other for one, other in pairs) and pairs[0][0] != pairs[1][0]  # a residual of each rank


CLIENT = ["pydantic", "httpx", "httpx-sse", "typer", "rich", "PyYAML", "pathspec", "pip"]


def test_editable_install_provides_hooks_and_train_without_index(tmp_path: Path) -> None:
    python = environment_with_requirements(tmp_path / "clone", [*CLIENT, "hatchling"])
    pip(python, "install", "-e", ".")
    program = """
import ratchet_client.cli.app, ratchet_hooks.specs
from importlib.metadata import requires, version
print(ratchet_hooks.__file__, version("ratchet-train"), any("ratchet-hooks" in line for line in requires("ratchet-train")))
"""
    place, *told = run(python, program).split()
    assert Path(place).is_relative_to(ROOT / "hooks") and told == [RATCHET_VERSION, "False"]


def test_client_install_requires_hooks_but_not_torch(wheels: Path, tmp_path: Path) -> None:
    python = environment_with_requirements(tmp_path / "client", CLIENT)
    pip(python, "install", "--find-links", str(wheels), "ratchet-train")
    program = """
import ratchet_client.cli.app, ratchet_contract.spec.parse, ratchet_hooks
from importlib.metadata import version
from importlib.util import find_spec
print(ratchet_hooks.__file__, version("ratchet-hooks"), version("ratchet-train"), find_spec("torch"))
"""
    place, *told = run(python, program).split()
    assert Path(place).is_relative_to(python.parents[1]) and told == [RATCHET_VERSION, RATCHET_VERSION, "None"]
    pip(python, "uninstall", "--yes", "ratchet-train")
    assert run(python, "import ratchet_hooks.specs; print(ratchet_hooks.specs.PowerSGDSpec().name)") == "powerSGD\n"
