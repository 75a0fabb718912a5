"""Packages that a job's interpreter lacks, by what its code certainly imports; nothing of the code is run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.preflight import imports
from ratchet_service.preflight.imports import Imported
from ratchet_service.preflight.report import Report
from ratchet_service.preflight.resolve import resolve
from ratchet_service.scheduling.machine import Machine

SCRIPT: dict[str, Any] = {"script": ["train.py"]}
TASK: dict[str, Any] = {"task": {"entrypoint": "pkg.mine:Mine"}}
BODY = "class Mine:\n    def build(self, ctx): ...\n    def loss(self, model, batch): ...\n"


def looked_at(tmp_path: Path, what: dict[str, Any], **files: str) -> tuple[list[Warning_], list[FieldProblem]]:
    root = tmp_path / "code"
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + f"\nopen({str(tmp_path / 'run')!r}, 'w')\n")
    given = {
        "name": "j",
        "code": {"path": str(root)},
        "world": {"device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        **what,
    }
    _, warnings, problems = resolve(parse_spec(given), Machine((), 4))
    assert not (tmp_path / "run").exists(), "the code was run"
    return [w for w in warnings if w.code == "package-missing"], problems


def test_missing_package_is_refused_with_location_and_pip_command(tmp_path: Path) -> None:
    files = {
        "train": "import os, yaml\nimport absent_one.sub\nfrom helper import net",
        "helper": "from absent_two import x",
    }
    _, (problem,) = looked_at(tmp_path, SCRIPT, **files)
    assert (problem.pointer, problem.code) == ("/script/0", "package-missing")
    assert "'absent_one' (train.py, line 2)" in problem.detail and "'absent_two' (helper.py, line 1)" in problem.detail
    assert f"{sys.executable} -m pip install absent_one absent_two" in problem.detail


def test_missing_package_of_task_module_or_parent_is_refused(tmp_path: Path) -> None:
    files = {"pkg/__init__": "import absent_one", "pkg/mine": f"import absent_two\n{BODY}"}
    _, (problem,) = looked_at(tmp_path, TASK, **files)
    assert (problem.pointer, problem.code) == ("/task/entrypoint", "package-missing")
    assert "pkg/__init__.py, line 1" in problem.detail and "pkg/mine.py, line 1" in problem.detail


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import absent\nexcept ImportError:\n    absent = None",
        "try:\n    import helper\nexcept ImportError:\n    pass",
        "from contextlib import suppress\nwith suppress(ImportError):\n    import absent",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import absent",
        "import __main__, sys, data, local.part, _json, helper_two",
        "from . import absent",
        "import local.absent",
    ],
)
def test_optional_imports_are_not_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "code" / "data").mkdir(parents=True)
    warnings, problems = looked_at(
        tmp_path,
        SCRIPT,
        **{"train": text, "local/part": "", "helper_two": "try:\n    import absent\nexcept ImportError: pass"},
    )
    assert problems == [] and warnings == []


@pytest.mark.parametrize(
    "text",
    [
        "def late():\n    import absent",
        "import sys\nif sys.argv[1:]:\n    import absent",
        "def late():\n    import helper",
        "import sys\nsys.path.append('/opt/mine')\nimport absent",
    ],
)
def test_missing_package_in_conditional_import_is_a_warning(tmp_path: Path, text: str) -> None:
    (warning,), problems = looked_at(tmp_path, SCRIPT, train=text, helper="import absent")
    assert problems == [] and "'absent'" in warning.detail and "pip install absent" in warning.detail


def test_name_that_was_not_asked_about_is_ignored() -> None:
    """The interpreter is the submitter's own, and may answer anything."""
    spec, report = parse_spec({"name": "j", "code": {"path": "/code"}, **SCRIPT}), Report()
    packages = Imported(conditional={"absent": "train.py"})
    imports.check(spec, sys.executable, packages, ("unasked",), report)
    assert report.warnings == []
    imports.check(spec, sys.executable, packages, ("unasked", "absent"), report)
    (warning,) = report.warnings
    assert "'absent' (train.py)" in warning.detail and "unasked" not in warning.detail


def test_import_check_uses_spec_python_path(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "absent.py").write_text("")
    given = SCRIPT | {"env": {"PYTHONPATH": str(tmp_path / "lib")}}
    assert looked_at(tmp_path, given, train="import absent") == ([], [])
    below = {"script": ["tools/train.py"]}
    files = {"tools/train": "import beside, above", "tools/beside": "", "above": ""}
    assert looked_at(tmp_path, below, **files) == ([], [])
