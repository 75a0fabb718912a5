"""A new user's machine: interpreters without packages, interpreters that lie, GPUs that are not there."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_HIDING = """
import os, sys
from importlib.machinery import PathFinder
hidden = frozenset(os.environ["TEST_HIDDEN"].split(","))
class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""

_WHERE = """/proc/self/fd/$(sed -n 's/.*"answer": *\\([0-9]*\\).*/\\1/p')"""
"""The descriptor that the question names."""


def environment_hiding_packages(directory: Path, *packages: str) -> dict[str, str]:
    """Variables under which every Python of this environment has everything but ``packages``: they are not found."""
    shim = directory / "shim"
    shim.mkdir(exist_ok=True)
    (shim / "sitecustomize.py").write_text(_HIDING)
    return {"PYTHONPATH": str(shim), "TEST_HIDDEN": ",".join(packages)}


def python_with_answer_of(directory: Path, file: Path) -> Path:
    """An interpreter that answers every question with the content of ``file``."""
    return _script(directory / "answering-python", f"cat {shlex.quote(str(file))} > {_WHERE}")


def python_without_packages(directory: Path, *packages: str) -> Path:
    """An interpreter like this one that does not have ``packages``."""
    words = [f"{key}={value}" for key, value in environment_hiding_packages(directory, *packages).items()]
    return _script(directory / f"without-{'-'.join(packages)}", f'exec env {shlex.join(words)} {sys.executable} "$@"')


def python_with_fake_answer(directory: Path, rank: str = "exit 1", **findings: Any) -> Path:
    """An interpreter that answers the service's question with ``findings``, and runs ``rank`` (shell) for anything else."""
    answer = {"version": [3, 11, 9], "protocol": 1, "torch": True, "torch_version": "2.13.0+cpu", **findings}
    body = f'if [ "$1" = -c ]; then printf %s {shlex.quote(json.dumps(answer))} > {_WHERE}; exit; fi\n{rank}'
    return _script(directory / f"python-{len(list(directory.iterdir()))}", body)


def fake_rank_command() -> str:
    """The torch-free rank of ``tests.support.fake_trainer`` in a real rank's place."""
    return f'exec env PYTHONPATH={ROOT} {sys.executable} -P {ROOT}/tests/support/fake_trainer.py rank "$@"'


def path_with_fake_nvidia_smi(directory: Path, gpus: int) -> str:
    """A PATH on which ``nvidia-smi`` lists so many GPUs."""
    directory.mkdir(exist_ok=True)
    lines = "".join(f"echo {index}\n" for index in range(gpus))
    _script(directory / "nvidia-smi", lines)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path
