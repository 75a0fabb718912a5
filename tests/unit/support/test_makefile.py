"""What the targets of the Makefile install, and when."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import virtual_environments
from tests.support.docs import ROOT

# makes an environment whose interpreter is itself, and writes what it is asked to do
_PYTHON = """#!/bin/sh
echo "$*" >> "{log}"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""
_NPM = """#!/bin/sh
echo "npm $1" >> "{log}"
mkdir -p tests/web/node_modules
"""
_TESTS = ("ruff", "mypy", "pytest", "moto", "botocore", "schemathesis", "matplotlib", "lightning", "transformers")


class Clone:
    def __init__(self, place: Path) -> None:
        self.place, self.log = place, place / "log"
        needed = (
            "Makefile",
            "pyproject.toml",
            "constraints.txt",
            "deploy/constraints.txt",
            "tests/web/package-lock.json",
        )
        for name in needed:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
        for program, text in (("python", _PYTHON), ("npm", _NPM)):
            (place / program).write_text(text.format(log=self.log))
            (place / program).chmod(0o755)

    def make(self, target: str) -> list[str]:
        """What the interpreters and npm were asked to do, line by line."""
        self.log.write_text("")
        command = ["make", "--silent", target, f"PYTHON={self.place / 'python'}"]
        environment = os.environ | {"PATH": f"{self.place}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(command, cwd=self.place, env=environment, check=True, capture_output=True)
        return self.log.read_text().splitlines()


def extras(lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := re.search(r"-m pip install .*-e \.\[([\w,]+)\]", line))]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_make_demo_installs_needed_extras_once_and_test_the_rest(clone: Clone) -> None:
    said = clone.make("demo")
    assert said[0] == "-m venv .venv" and extras(said) == ["service,worker"] and said[-1] == "-m examples.demo"
    assert clone.make("demo") == ["-m examples.demo"]
    said = clone.make("test")
    assert not any("venv" in line.split() for line in said) and extras(said) == ["dev"] and "-m pytest" in said[-1]
    assert said.count("npm ci") == 1 and not any("npm" in line for line in clone.make("test"))
    assert extras(clone.make("test")) == [] == extras(clone.make("demo"))


def test_make_test_on_new_clone_installs_everything(clone: Clone) -> None:
    said = clone.make("test")
    assert said[0] == "-m venv .venv" and extras(said)[-1] == "dev" and "-m pytest" in said[-1]


def test_make_demo_extras_suffice_for_demo_and_service(clone: Clone, tmp_path: Path) -> None:
    (asked,) = extras(clone.make("demo"))
    needed = virtual_environments.required_distributions(set(asked.split(",")))
    assert {"torch", "fastapi", "scikit-learn"} < set(needed) and not set(_TESTS) & set(needed)
    python = virtual_environments.environment_with_extras(tmp_path / "venv", set(asked.split(",")))
    modules = (
        "examples.demo.__main__, ratchet_service.commands.serve, ratchet_worker.tasks.digits, ratchet_client.cli.app"
    )
    subprocess.run([python, "-c", f"import {modules}"], cwd=ROOT, check=True)
