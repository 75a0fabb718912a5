"""Every private name of torch that hooks and worker touch is in a list here, and is there in this torch.

Found by reading the source: a new use without its row is red, and so is a row that nothing uses. How the larger ones behave is
pinned in ``test_hooks_torch_pin``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks import local_sgd as ours
from ratchet_hooks.specs import HookSpecBase, PostLocalSGDSpec, PowerSGDSpec
from ratchet_hooks.specs_powersgd import BatchedPowerSGDSpec
from tests.support.docs import ROOT
from tests.support.groups import Ranks

ON_CLASSES: dict[str, object] = {
    "_push_all_rebuilt_params": Reducer,
    "_rebuild_buckets": Reducer,
    "_get_zeros_like_grad_buckets": Reducer,
    "_build_debug_param_to_name_mapping": DistributedDataParallel,
    "_build_params_for_reducer": DistributedDataParallel,
    "_ddp_init_helper": DistributedDataParallel,
    "_pre_forward": DistributedDataParallel,
    "_remove_autograd_hooks": DistributedDataParallel,
    "_set_static_graph": DistributedDataParallel,
    "_get_backend": dist.ProcessGroup,
    "_compiled_call_impl": torch.nn.Module,
    "_cdata": torch.UntypedStorage,
    "_version": torch.Tensor,
    "_save_to_state_dict": torch.nn.Module,
    "_opname": torch.ops.aten.add.Tensor,
    "_should_compress": power_sgd,
    "_report_compression_stats": power_sgd,
    "_foreach_copy_": torch,
    "_foreach_norm": torch,
    "_neg_view": torch,
    "_current_graph_task_id": torch._C,
    "Future": torch._C,
}
ON_A_DDP = {
    "_bucket_config", "_comm_hooks", "_delay_all_reduce_params", "_has_rebuilt_buckets", "_lazy_init_ran",
    "_static_graph_delay_allreduce_enqueued", "_use_python_reducer", "bucket_bytes_cap", "bucket_bytes_cap_list",
    "find_unused_parameters", "logger", "mixed_precision", "parameters_to_ignore", "process_group", "reducer",
    "require_backward_grad_sync", "static_graph",
}  # fmt: skip
ON_A_MODULE = {"_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"}
ON_AN_OPTIMIZER = {"_optimizer_state_dict_post_hooks", "_optimizer_state_dict_pre_hooks"}
ELSEWHERE = {*ON_A_MODULE, *ON_AN_OPTIMIZER, "_timeout"}  # looked at beside a DDP, too
IMPORTED = {
    "torch._C._distributed_c10d": {
        "GradBucket",
        "Reducer",
        "_DEFAULT_FIRST_BUCKET_BYTES",
        "_compute_bucket_assignment_by_size",
    },
    "torch._C._dynamo.guards": {"TensorGuards", "dict_version"},
    "torch.utils._python_dispatch": {"TorchDispatchMode"},
}
NOT_TORCHS = {
    "_amp_state": "Apex", "_fields_": "ctypes", "_replace": "typing",
    "_batches_that_stepped": "Lightning", "_call_callbacks_load_state_dict": "Lightning",
    "_call_callbacks_state_dict": "Lightning",
    "_combined_loader": "Lightning", "_num_ready_batches_reached": "Lightning", "_optimizer": "Lightning",
    "_should_accumulate": "Lightning",
    "_get_collator_with_removed_columns": "transformers", "_get_train_sampler": "transformers",
    "_initial_global_step": "transformers", "_remove_unused_columns": "transformers",
    "_get_output_dir": "transformers", "_load_optimizer_and_scheduler": "transformers", "_optimizers": "accelerate",
    "_exit": "os", "_sysconfigdata": "the standard library", "_fields": "a named tuple",
    "_inst": "the standard library", "_set_native_id": "the standard library", "_rand": "numpy",
    "_ddp_params_and_buffers_to_ignore": "a module that asks DDP so", "_extra_state": "the end of a state_dict's key",
    "_available": "the end of a name", "_compress_wrapper": "the end of a name", "_compress": "the end of a name",
    "_per_second": "the end of a name",
}  # fmt: skip


def _trees() -> Iterator[ast.Module]:
    for package in ("hooks/ratchet_hooks", "worker/ratchet_worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ast.parse(path.read_text(), str(path))


def _own(node: ast.AST) -> set[str]:
    """Names that this node defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        return {node.attr} if node.value.id == "self" else set()
    return {node.arg} if isinstance(node, ast.keyword) and node.arg else set()


def _touched(node: ast.AST) -> set[str]:
    """Attributes that this node reads or writes, by dot or by string."""
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return {node.value}
    return set()


def test_every_private_name_of_torch_that_is_used_stands_here_and_is_used() -> None:
    nodes = [node for tree in _trees() for node in ast.walk(tree)]
    touched = {name for node in nodes for name in _touched(node)}
    own = {name for node in nodes for name in _own(node)}
    listed = {*ON_CLASSES, *ON_A_DDP, *ELSEWHERE}
    private = {name for name in touched if name.startswith("_") and not name.startswith("__") and name != "_C"}
    imported = set().union(*IMPORTED.values())
    assert sorted(private - own - listed - imported - set(NOT_TORCHS)) == []
    assert sorted(listed - touched) == [] and sorted(set(NOT_TORCHS) - touched) == []


def test_every_private_module_of_torch_that_is_imported_stands_here() -> None:
    found: dict[str, set[str]] = {}
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("torch"):
                names = {alias.name for alias in node.names}
                hidden = names if "._" in module else {name for name in names if name.startswith("_")}
                found.setdefault(module, set()).update(hidden)
    assert {module: names for module, names in found.items() if names} == IMPORTED
    for module, names in IMPORTED.items():
        assert all(hasattr(import_module(module), name) for name in names)


@pytest.mark.parametrize("name", ON_CLASSES)
def test_it_is_there(name: str) -> None:
    assert hasattr(ON_CLASSES[name], name)


def test_a_module_and_an_optimizer_have_what_tells_that_they_are_as_they_were() -> None:
    module = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    assert {*ON_A_MODULE, "_parameters", "_buffers", "_modules"} <= vars(module).keys() and vars(
        optimizer
    ).keys() >= ON_AN_OPTIMIZER
    assert [type(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules")] == [dict] * 3
    assert not any(vars(module)[name] for name in ON_A_MODULE) and not any(vars(optimizer)[n] for n in ON_AN_OPTIMIZER)


def test_what_is_overridden_or_called_takes_what_it_took() -> None:
    def arguments(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    ddp = DistributedDataParallel
    assert arguments(ddp._ddp_init_helper) == [
        "self", "parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph",
    ]  # fmt: skip
    assert arguments(ddp._build_debug_param_to_name_mapping) == ["self", "parameters"]
    assert arguments(ddp._set_static_graph) == arguments(ddp._remove_autograd_hooks) == ["self"]
    assert arguments(power_sgd._should_compress) == [
        "num_rows",
        "num_cols",
        "matrix_approximation_rank",
        "min_compression_rate",
    ]
    assert arguments(power_sgd._report_compression_stats) == ["bucket", "state"]


def _of_a_ddp(rank: int, names: set[str]) -> tuple[set[str], list[Any]]:
    module = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(module, static_graph=True)
    config, options = ddp._bucket_config, dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    facts = [config.first_bucket_bytes_cap, config.bucket_bytes_cap, options._timeout.total_seconds() > 0,
             ddp._comm_hooks, ddp._has_rebuilt_buckets, module._non_persistent_buffers_set]  # fmt: skip
    return {name for name in names if not hasattr(ddp, name)}, facts


def test_a_ddp_has_the_attributes_that_are_read() -> None:
    with Ranks(1) as ranks:
        missing, facts = ranks.run(_of_a_ddp, ON_A_DDP)[0]
    assert missing == set()
    assert facts == [2**20, 25 * 2**20, True, [], False, set()]


def test_the_state_of_post_local_sgd_has_the_slots_that_are_stored() -> None:
    assert set(local_sgd.PostLocalSGDState.__slots__) == {*ours._SLOTS, *ours._GROUPS}


DIFFERENT: dict[str, dict[str, str]] = {
    "powerSGD": {"process_group": "that of the job"},
    "batched_powerSGD": {"process_group": "that of the job", "batch_tensors_with_same_shape": "one matrix per bucket"},
    "post_localSGD": {
        "process_group": "that of the job", "subgroup": "subgroup_size", "warmup_steps": "start_localSGD_iter",
        "period": "model_averaging_period",
    },
}  # fmt: skip
OWN = {"name", "wrapper", "subgroup_size", "model_averaging_period"}
SOURCES: dict[str, tuple[type[HookSpecBase], list[Callable[..., Any]]]] = {
    "powerSGD": (PowerSGDSpec, [power_sgd.PowerSGDState]),
    "batched_powerSGD": (BatchedPowerSGDSpec, [power_sgd.PowerSGDState]),
    "post_localSGD": (
        PostLocalSGDSpec,
        [
            local_sgd.PostLocalSGDState, averagers.PeriodicModelAverager,
            hierarchical_model_averager.HierarchicalModelAverager,
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_the_schema_has_every_parameter_of_torchs_states_with_its_default(name: str) -> None:
    spec, sources = SOURCES[name]
    properties = spec.model_json_schema()["properties"]
    wanted = {key: p.default for source in sources for key, p in inspect.signature(source).parameters.items()}
    assert set(wanted) - set(DIFFERENT[name]) == set(properties) - OWN
    given = {k: v for k, v in wanted.items() if k in properties and v is not inspect.Parameter.empty}
    assert given == {key: properties[key].get("default") for key in given}
    for key, schema in properties.items():
        assert key == "name" or schema.get("description"), key
        numbers = [s for s in [schema, *schema.get("anyOf", [])] if s.get("type") in ("integer", "number")]
        assert all({"minimum", "exclusiveMinimum"} & set(s) for s in numbers), f"{key} has no limit"
