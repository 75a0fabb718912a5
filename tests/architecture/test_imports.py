"""What each process may import, seen at run time in a fresh interpreter: import-linter cannot see lazy tables."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "fastapi", "sqlalchemy", "alembic", "uvicorn", "numpy")

_PROGRAM = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name.split(".")[-1] == "__main__" or module.name.startswith(tuple(json.loads(sys.argv[2]))):
        continue
    importlib.import_module(module.name)
print(json.dumps([name for name in json.loads(sys.argv[3]) if name in sys.modules]))
"""


def loaded(package: str, skip: tuple[str, ...] = ()) -> set[str]:
    """Names of HEAVY that importing every module of ``package`` brings into a fresh process."""
    skipped = skip
    arguments = [sys.executable, "-c", _PROGRAM, package, json.dumps(skipped), json.dumps(HEAVY)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("ratchet_service", {"torch"}),
        ("ratchet_store", {"torch", "fastapi", "sqlalchemy", "numpy"}),
        ("ratchet_contract", {"torch", "fastapi", "sqlalchemy", "numpy"}),
        ("ratchet_client", {"torch", "fastapi", "sqlalchemy", "numpy"}),
        ("ratchet_worker", {"fastapi", "sqlalchemy", "alembic", "uvicorn"}),
    ],
)
def test_package_does_not_import_forbidden_modules(package: str, forbidden: set[str]) -> None:
    # the integrations import what they integrate, which is theirs to choose
    assert (
        not loaded(
            package,
            skip=("ratchet_worker.integrations", "ratchet.lightning", "ratchet.accelerate", "ratchet.transformers"),
        )
        & forbidden
    )


def test_hooks_package_imports_only_torch_numpy_and_stdlib() -> None:
    """But for the integrations, whose frameworks are the user's."""
    imported: set[str] = set()
    for path in (ROOT / "hooks" / "ratchet_hooks").rglob("*.py"):
        if path.parent.name == "integrations":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "numpy", "ratchet_hooks"}


@pytest.mark.parametrize(
    "module",
    ["ratchet_worker.agent.main", "ratchet_hooks.specs", "ratchet_hooks.registry", "ratchet_client.cli", "ratchet"],
)
def test_module_import_does_not_load_torch(module: str) -> None:
    program = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
