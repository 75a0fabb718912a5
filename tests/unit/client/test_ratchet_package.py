"""``import ratchet``: its names, what it costs, what is said where something of it, or all of it, is not there."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ratchet
from ratchet_contract.script.public_names import PUBLIC
from ratchet_contract.script.unmanaged_script import is_unmanaged
from ratchet_contract.spec.parse import parse_spec
from ratchet_contract.version import RATCHET_VERSION
from ratchet_service.preflight import imports
from ratchet_service.preflight.imports import Imported
from ratchet_service.preflight.report import Report
from ratchet_service.preflight.resolve import resolve
from ratchet_service.scheduling.machine import Machine
from ratchet_worker.host.user_code import import_error

pytestmark = pytest.mark.processes


def run(folder: Path, program: str) -> str:
    script = folder / "train.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_exports_exactly_the_documented_public_names() -> None:
    assert sorted(ratchet.__all__) == sorted(PUBLIC) == dir(ratchet)
    for name in ratchet.__all__:
        assert getattr(ratchet, name) is not None
    assert ratchet.__version__ == RATCHET_VERSION
    scope: dict[str, object] = {}
    exec("from ratchet import *", scope)
    assert scope.keys() - {"__builtins__"} == set(PUBLIC) and scope["Client"] is ratchet.Client
    with pytest.raises(AttributeError, match=r"no attribute 'Sesion'; it has: .*Client"):
        ratchet.Sesion  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Sesion' from 'ratchet'"):
        exec("from ratchet import Sesion")


def test_package_type_checking_imports_match_public_names() -> None:
    tree = ast.parse(Path(ratchet.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert not any(
        isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body
    )  # would be Any
    found = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert found.keys() == PUBLIC.keys()
    assert all(_named(found[name]) is _named(PUBLIC[name]) for name in PUBLIC)  # which has the public import paths
    assert Path(ratchet.__file__).with_name("py.typed").exists()


def _named(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def test_package_without_torch_offers_client_and_names_missing_extra(tmp_path: Path) -> None:
    program = """
import sys
import ratchet
assert "torch" not in sys.modules and "httpx" not in sys.modules
ratchet.Client, ratchet.Job, ratchet.JobSpec
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as where it is not installed
try:
    from ratchet import Session
except ImportError as error:
    print(error)
"""
    assert run(tmp_path, program) == (
        "ratchet.Session needs 'torch', which is not installed here: pip install 'ratchet-train[worker]'\n"
    )


def test_package_help_shows_only_installed_parts(tmp_path: Path) -> None:
    program = """
import pydoc, sys
sys.modules["torch"] = None  # as where it is not installed
import ratchet
assert "Client" in dir(ratchet) and "Session" not in dir(ratchet)
print(pydoc.render_doc(ratchet))
"""
    told = run(tmp_path, program)
    assert "ratchet_client.resources.client.RatchetClient" in told and "class Session" not in told


@pytest.mark.parametrize("use", ["from ratchet import Session", "import ratchet; ratchet.Session"])
def test_user_module_shadowing_ratchet_is_reported_by_rank(tmp_path: Path, use: str) -> None:
    (tmp_path / "ratchet.py").write_text("teeth = 12\n")
    program = f"""
from ratchet_worker.host.exit import cause_of
try:
    {use}
except Exception as error:
    print(*cause_of(error))
"""
    told = run(tmp_path, program)
    assert told.startswith("user-error ratchet.Session does not exist")
    assert f"found {tmp_path / 'ratchet.py'}" in told and "rename it" in told
    assert "from ratchet_worker.session import Session" in told


@pytest.mark.parametrize("own", ["ratchet.py", "ratchet/__init__.py"])
def test_user_module_shadowing_ratchet_is_reported_at_submission(tmp_path: Path, own: str) -> None:
    def told() -> list[str]:
        spec = {"name": "j", "code": {"path": str(tmp_path)}, "script": ["train.py"], "world": {"device": "cpu"}}
        _, warnings, problems = resolve(parse_spec(spec), Machine((), 4))
        assert problems == []
        return [warning.detail for warning in warnings if warning.code == "ratchet-shadowed"]

    (tmp_path / "train.py").write_text("import torch\nfrom ratchet import Session\n\nwith Session() as session: ...\n")
    assert told() == []
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("teeth = 12\n")
    (text,) = told()
    assert f"`import ratchet` (train.py, line 2): {own} of the code directory has the name of" in text
    assert f"Rename {own}, or write `from ratchet_worker.session import Session`" in text


def test_missing_ratchet_module_cure_installs_ratchet_train(tmp_path: Path) -> None:
    spec = parse_spec({"name": "j", "script": ["train.py"], "code": {"path": str(tmp_path)}})
    report = Report()
    found = Imported({"ratchet": "train.py, line 2", "yaml": "train.py, line 3"})
    imports.check(spec, "/env/bin/python", found, ["ratchet", "yaml"], report)
    (problem,) = report.problems
    ours = f"'ratchet-train[worker]=={RATCHET_VERSION}'"
    assert f"/env/bin/python -m pip install {ours} yaml " in problem.detail
    told = import_error("train.py", ModuleNotFoundError("No module named 'ratchet'", name="ratchet"), tmp_path)
    assert f"{sys.executable} -m pip install {ours} " in told.detail


@pytest.mark.parametrize(
    ("text", "unmanaged"),
    [
        (b"from ratchet import Session", False), (b"import ratchet\nratchet.Session()", False),
        (b"from ratchet.accelerate import Accelerator", False),
        (b"from ratchet_worker.session import Session", False), (b"import ratchet  # my own wrench", True),
        (b"import ratchet_hooks\nfrom sqlalchemy.orm import Session", True), (b"# ratchet submit; Session", True),
        (b"import os, ratchet\nratchet.Session()", False), (b"import ratchet as r\nr.Session()", False),
        (b"from ratchet import Session as S", False), (b"import numpy as np, ratchet\nratchet.Session()", False),
        (b"import os, \\\n    ratchet as r\nr.Session()", False), (b"import os, ratchet.lightning", False),
        (b"import os, ratchet  # my own wrench", True), (b"import os\nratchet = Session()", True),
        (b"import os,\nratchet = Session()", True), (b"import a," + b"\\,"*60, True),  # ends at once
        (b"import numpy as np, ratchet_hooks\nfrom sqlalchemy.orm import Session", True),
    ],
)  # fmt: skip
def test_is_unmanaged_detects_scripts_without_session(text: bytes, unmanaged: bool) -> None:
    assert is_unmanaged(text) is unmanaged
