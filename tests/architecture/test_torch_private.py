"""Private parts of torch are named in ``ratchet_hooks.torch_compat`` alone, which knows what to do where one is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.support.docs import ROOT

FOLDERS = ("hooks", "worker", "store", "service", "contract", "client", "examples")
COMPAT = ROOT / "hooks/ratchet_hooks/torch_compat.py"
NOT_TORCHS = {
    "_amp_state": "Apex", "_asdict": "a named tuple", "_batches_that_stepped": "Lightning",
    "_call_callbacks_load_state_dict": "Lightning", "_call_callbacks_on_load_checkpoint": "Lightning",
    "_call_callbacks_on_save_checkpoint": "Lightning", "_call_lightning_module_hook": "Lightning",
    "_current_frames": "sys", "_IOBase": "_io", "_run_exitfuncs": "atexit", "_shutdown": "threading",
    "_computed": "torchmetrics", "_dataloaders": "Accelerate", "_reset_state": "Accelerate",
    "_data_fetcher": "Lightning", "_defaults": "torchmetrics", "_has_run": "Lightning",
    "_init_n_averaged": "Lightning", "_last_train_dl_reload_epoch": "Lightning", "_last_val_dl_reload_epoch": "Lightning",
    "_logger_connector": "Lightning", "_non_blocking": "Accelerate", "_shared_state": "Accelerate",
    "_results": "Lightning", "_skip_backward": "Lightning",
    "_call_callbacks_state_dict": "Lightning", "_combined_loader": "Lightning", "_exit": "os", "_experiment": "Lightning",
    "_kwargs": "Lightning", "_tracking_uri": "Lightning",
    "_fields_": "ctypes", "_seen_batches_per_dataloader": "Lightning",
    "_get_output_dir": "transformers", "_initial_global_step": "transformers", "_inst": "random",
    "_load_optimizer_and_scheduler": "transformers", "_num_ready_batches_reached": "Lightning",
    "_optimizer": "Lightning", "_rand": "numpy", "_replace": "a named tuple", "_should_accumulate": "Lightning",
    "_checkpoint_connector": "Lightning", "_user_managed": "Lightning",
}  # fmt: skip
PRELOADED = {
    "torch._dynamo": "a module that the fork server imports early; where it is gone, each rank imports torch by itself"
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def findings(source: str, own: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """Line and text of each use of a private part of torch. ``own``: private names that Ratchet itself defines."""
    return _findings(list(ast.walk(ast.parse(source))), own)


def _findings(nodes: list[ast.AST], own: frozenset[str]) -> list[tuple[int, str]]:
    return sorted({*_imports(nodes), *_below_torch(nodes), *_of_objects(nodes, own), *_strings(nodes)})


def _imported(node: ast.AST) -> dict[str, str]:
    """What an import statement brings, by the name that it gets here."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {}


def _imports(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        for module in _imported(node).values():
            if module.split(".")[0] == "torch" and any(map(private, module.split("."))):
                yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def _below_torch(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """``torch._x``, ``torch.a._b``, ``dist._x``: attributes of what is imported from torch."""
    imported = {name for n in nodes for name, module in _imported(n).items() if module.split(".")[0] == "torch"}
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in imported:
                yield node.lineno, ast.unparse(node)


def _of_objects(nodes: list[ast.AST], own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """``tensor._version``, ``ddp.reducer._rebuild_buckets``: attributes that nothing of Ratchet's defines."""
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not private(node.attr) or node.attr in own or node.attr in NOT_TORCHS:
            continue
        inherited = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        inherited |= isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
        if not inherited:
            yield node.lineno, ast.unparse(node)


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node.value in PRELOADED:
            continue
        if re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", node.value):
            yield node.lineno, repr(node.value)


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """Private names that a module assigns or defines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def of_torch() -> frozenset[str]:
    """Private names of tensors, modules and optimizers: nothing says that an attribute of that name is Ratchet's own."""
    module = torch.nn.BatchNorm1d(1)
    return frozenset(chain(dir(module), dir(module.weight), dir(torch.optim.SGD(module.parameters()))))


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path != COMPAT]


def test_only_torch_compat_uses_private_torch_names() -> None:
    modules = {path.relative_to(ROOT): list(ast.walk(ast.parse(path.read_text()))) for path in sources()}
    assert len(modules) > 200
    own = frozenset(name for nodes in modules.values() for name in defined(nodes) if private(name)) - of_torch()
    found = [f"{path}:{line}: {what}" for path, nodes in modules.items() for line, what in _findings(nodes, own)]
    assert not found, "move these behind a function of ratchet_hooks.torch_compat:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C._distributed_c10d import Reducer",
        "from torch.distributed import _make_nccl_premul_sum",
        "def f():\n    from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch\ntorch._foreach_copy_([], [])",
        "import torch\nx = torch._C.Future",
        "import torch.distributed as dist\nlimit = dist._DEFAULT_FIRST_BUCKET_BYTES",
        "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as p\np._orthogonalize(1)",
        "def f(tensor):\n    return tensor.untyped_storage()._cdata",
        "importlib.import_module('torch._inductor.config')",
    ],
)
def test_private_name_scan_reports_private_torch_use(source: str) -> None:
    assert [line for line, _ in findings(source)] == [source.count("\n") + 1]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "class A(DDP):\n    def f(self):\n        super()._pre_forward()\n        return self._comm_hooks",
        "import os\nos._exit(1)",
        "_, _a = 1, 2",
    ],
)
def test_private_name_scan_accepts_public_torch_use(source: str) -> None:
    assert findings(source) == []
