"""The parts of torch that hooks override, call or read: their forms on the installed torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks import torch_compat
from ratchet_hooks.algorithms import local_sgd as ours
from ratchet_hooks.specs.hook_specs import HookSpecBase, PostLocalSGDSpec, PowerSGDSpec
from ratchet_hooks.specs.powersgd import BatchedPowerSGDSpec
from tests.support.gloo_ranks import Ranks


def test_torch_private_functions_keep_their_signatures() -> None:
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


def _of_a_ddp(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    module = torch.nn.BatchNorm1d(2)
    ddp = DistributedDataParallel(module, **options)
    torch_compat.check_ddp_attributes(ddp)
    assert dist.group.WORLD is not None
    found = {
        "limits": torch_compat.bucket_limits(ddp),
        "timeout": torch_compat.timeout_of(dist.group.WORLD, torch.device("cpu")) > timedelta(0),
        "hooks": torch_compat.comm_hooks(ddp),
        "python": torch_compat.reduces_in_python(ddp),
        "delays": torch_compat.delays_parameters(ddp),
        "run": torch_compat.has_run_forward(ddp),
        "buckets": [[p is module.weight for p in b] for b in torch_compat.bucket_parameters(ddp.reducer)],
        "persistent": torch_compat.is_persistent(module, "running_mean"),
        "own buffers": list(torch_compat.own_buffers(module)),
    }
    seen = []
    module.register_forward_hook(lambda *_: seen.append(torch_compat.in_backward()))
    loss = ddp(torch.ones(3, 2)).sum()
    loss.register_hook(lambda _: seen.append(torch_compat.in_backward()))
    loss.backward()
    return {**found, "run later": torch_compat.has_run_forward(ddp), "in backward": seen}


@pytest.mark.parametrize(("options", "limits"), [({}, (2**20, 25 * 2**20)), ({"bucket_cap_mb": 2}, (2**21, 2**21))])
def test_torch_ddp_private_attributes_have_expected_values(
    two_ranks: Ranks, options: dict[str, Any], limits: tuple[int, int]
) -> None:
    assert two_ranks.run(_of_a_ddp, options)[0] == {
        "limits": limits, "timeout": True, "hooks": [], "python": False, "delays": False, "run": False,
        "buckets": [[True, False]], "persistent": True, "own buffers": ["running_mean", "running_var", "num_batches_tracked"],
        "run later": True, "in backward": [False, True],
    }  # fmt: skip


def test_torch_post_local_sgd_state_has_exactly_the_stored_slots() -> None:
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
def test_hook_schemas_have_every_torch_parameter_and_default(name: str) -> None:
    spec, sources = SOURCES[name]
    properties = TypeAdapter(spec).json_schema()["properties"]
    wanted = {key: p.default for source in sources for key, p in inspect.signature(source).parameters.items()}
    assert set(wanted) - set(DIFFERENT[name]) == set(properties) - OWN
    given = {k: v for k, v in wanted.items() if k in properties and v is not inspect.Parameter.empty}
    assert given == {key: properties[key].get("default") for key in given}
    for key, schema in properties.items():
        assert key == "name" or schema.get("description"), key
        numbers = [s for s in [schema, *schema.get("anyOf", [])] if s.get("type") in ("integer", "number")]
        assert all({"minimum", "exclusiveMinimum"} & set(s) for s in numbers), f"{key} has no limit"
