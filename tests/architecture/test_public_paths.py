"""Import paths that users' code, stored specs and other programs name: they stay, wherever the code behind them lies."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FACADES = {
    "ratchet_client.client": "ratchet_client.resources.client",
    "ratchet_client.errors": "ratchet_client.http.errors",
    "ratchet_client.job": "ratchet_client.resources.job",
    "ratchet_contract.api": "ratchet_contract.api.views",
    "ratchet_contract.messages": "ratchet_contract.protocol.messages",
    "ratchet_contract.spec": "ratchet_contract.spec.job",
    "ratchet_hooks.build": "ratchet_hooks.manage.managed_ddp",
    "ratchet_hooks.files": "ratchet_hooks.state.files",
    "ratchet_hooks.registry": "ratchet_hooks.specs.registry",
    "ratchet_hooks.specs": "ratchet_hooks.specs.hook_specs",
    "ratchet_service.launchers.planning": "ratchet_service.launchers.plan",
    "ratchet_store.compare": "ratchet_store.read.compare",
    "ratchet_worker.data.iterable": "ratchet_worker.data.streams",
    "ratchet_worker.session": "ratchet_worker.session.session",
}
IN_PLACE = [
    "ratchet",
    "ratchet_client",
    "ratchet_contract.env_vars",
    "ratchet_contract.errors",
    "ratchet_contract.paths",
    "ratchet_contract.phases",
    "ratchet_contract.version",
    "ratchet_hooks",
    "ratchet_hooks.errors",
    "ratchet_hooks.summary",
    "ratchet_hooks.integrations.accelerate",
    "ratchet_hooks.integrations.lightning",
    "ratchet_hooks.integrations.transformers",
    "ratchet_service.launchers.attempt_files",
    "ratchet_service.launchers.base",
    "ratchet_worker.data.loader",
    "ratchet_worker.integrations.accelerate",
    "ratchet_worker.integrations.lightning",
    "ratchet_worker.integrations.transformers",
    "ratchet_worker.task",
    "ratchet_worker.tasks.bytelm",
    "ratchet_worker.tasks.digits",
]
PROGRAMS = {  # and what each says without arguments
    "ratchet_service": "usage:",
    "ratchet_service.doctor": "--home",
    "ratchet_store.compare": "usage:",
    "ratchet_store.verify": "usage:",
    "ratchet_worker.agent": "launch_file",
    "ratchet_worker.rank": "this is one rank of a job",
    "ratchet_worker.export": "JSON",
    "ratchet_hooks.probe": "JSON",
}
PRODUCT = ("client", "contract", "hooks", "service", "store", "worker")


@pytest.mark.parametrize("path", sorted(FACADES))
def test_facade_exports_same_objects_as_implementation_module(path: str) -> None:
    facade, module = import_module(path), import_module(FACADES[path])
    assert sorted(facade.__all__) == sorted(set(_public(module)))
    assert all(getattr(facade, name) is getattr(module, name) for name in facade.__all__)


@pytest.mark.parametrize("path", IN_PLACE)
def test_public_module_can_be_imported(path: str) -> None:
    import_module(path)


@pytest.mark.parametrize("module", sorted(PROGRAMS))
def test_public_program_runs(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert PROGRAMS[module] in done.stdout + done.stderr, done


def test_no_product_module_imports_a_facade() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
        if any(facade in (source := path.read_text()) for facade in FACADES)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module in FACADES
        if not {alias.name for alias in node.names} <= _submodules(node.module)
    ]
    assert found == []


def _public(module: ModuleType) -> list[str]:
    """``__all__``, or what the module defines under names without an underscore."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    found = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    found += [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    found += [
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return [name for name in found if not name.startswith("_") and name != "log"]


def _submodules(package: str) -> set[str]:
    return {module.name for module in iter_modules(getattr(import_module(package), "__path__", []))}
