"""Hooks on DDP instances that others made: the same bits as under ``managed_ddp``, and resumed exactly."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks import register
from ratchet_hooks.errors import UnsupportedModel
from ratchet_hooks.specs import PowerSGDSpec
from ratchet_hooks.stock import spec_of
from tests.support.documented import documented
from tests.support.groups import Ranks
from tests.support.hook_cases import MANY_BUCKETS, Case
from tests.support.registered import own_differences, registered_differences, taken_over
from tests.support.registered_objects import refusal, spec_from

GUARDED = PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3, orthogonalization_epsilon=1e-8)
CONFIGURATIONS = {
    "plain": Case(),
    "static_graph": Case(ddp={"static_graph": True}),
    "gradient_as_bucket_view": Case(ddp={"gradient_as_bucket_view": True}),
    "static_views": Case(ddp={"static_graph": True, "gradient_as_bucket_view": True}, keep_grads=True),
    "unused": Case(ddp={"find_unused_parameters": True}, unused=True),
    "static_unused": Case(ddp={"static_graph": True}, unused=True),
    "accumulation_views": Case(accumulate=2, ddp={"gradient_as_bucket_view": True}),
    "order_changes": Case(turn=3),
    "mixed_tied_frozen": Case(mixed=True),
    "no_buffer_broadcast": Case(ddp={"broadcast_buffers": False}),
}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_every_ddp_configuration_resumes_exactly(two: Ranks, name: str) -> None:
    case = replace(CONFIGURATIONS[name], hook="powerSGD", cap=MANY_BUCKETS, spec=GUARDED)
    assert two.run(registered_differences, case, 6, 4) == [[], []]


def test_three_lines_make_the_documented_example_right(two: Ranks) -> None:
    """The control is the example as it stands, with rank 0's hook state on all ranks."""
    assert min(two.run(documented, "documented", 12, 5)) > 0.01
    assert two.run(documented, "ratchet", 12, 5) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["plain", "static_views", "accumulation_views"])
def test_a_function_and_state_of_ones_own_resume_exactly(two: Ranks, name: str) -> None:
    case = replace(CONFIGURATIONS[name], cap=MANY_BUCKETS)
    assert two.run(own_differences, case, 6, 4) == [[], []]


def test_its_state_is_what_makes_it_exact(two: Ranks) -> None:
    assert all(two.run(partial(own_differences, forget=True), Case(), 6, 4))


def test_nothing_is_left_of_the_reducer_and_hook_before(two: Ranks) -> None:
    for seen in two.run(taken_over):
        assert seen["calls"] == 0 and not seen["alive"] and seen["same"]
        assert sorted(seen["buckets"]) == list(range(len(seen["buckets"]))) and len(seen["buckets"]) >= 2
        assert seen["name"] == "ManagedDDP" and "on_bucket" in seen["logged"]


def left_behind(rank: int) -> list[bool]:
    """Whether DDP, module and a residual are there still when the last use of them is over."""
    ddp = DistributedDataParallel(torch.nn.Linear(16, 16))
    hook = register(ddp, "powerSGD", start_powerSGD_iter=2)
    for _ in range(4):
        ddp(torch.ones(2, 16)).sum().backward()
    state: Any = hook._algorithm
    found = [weakref.ref(ddp), weakref.ref(ddp.module), weakref.ref(state.state.error_dict[0])]
    del ddp, hook, state
    gc.collect()
    return [of() is not None for of in found]


def test_a_ddp_goes_with_its_last_use(two: Ranks) -> None:
    assert two.run(left_behind) == [[False] * 3] * 2


ASKED = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 8, "use_error_feedback": False, "random_seed": 5}
SPECS: dict[str, dict[str, Any]] = {
    "allreduce": {"name": "allreduce"},
    "fp16": {"name": "fp16_compress", "wrapper": None},
    "pertensor": {"name": "quantization_pertensor"},
    "powerSGD": {"name": "powerSGD", "wrapper": None, **ASKED},
    "wrapped": {"name": "powerSGD", "wrapper": "fp16_compress_wrapper", **ASKED},
    "wrapper": {"name": "powerSGD", "wrapper": "bf16_compress_wrapper", **ASKED, "warm_start": False},
}


def test_a_generator_that_was_drawn_from_has_no_seed() -> None:
    state, nobody = PowerSGDState(None, random_seed=3), cast(Any, None)
    asked = spec_of(state, powerSGD_hook, nobody)
    assert asked is not None and asked["random_seed"] == 3
    state.rng.randint(10)
    with pytest.raises(UnsupportedModel, match="register a new state"):
        spec_of(state, powerSGD_hook, nobody)


@pytest.mark.parametrize("name", list(SPECS))
def test_objects_of_torch_keep_their_parameters(two: Ranks, name: str) -> None:
    for found in two.run(spec_from, name):
        assert {key: found.get(key) for key in SPECS[name]} == SPECS[name]


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("after a forward", "right after its construction"),
        ("restored late", "before its first forward"),
        ("used state", "register a new one"),
        ("no hook", "name one"),
        ("twice", "one DDP has one hook"),
        ("not a DDP", "wrap the model"),
        ("subclass", "_Subclass"),
        ("wrapped twice", "one wrapper"),
        ("unknown parameter", "matrix_approximation_rank"),
        ("unmanaged", "ratchet_hooks.register"),
        ("unmanaged capture", "ratchet_hooks.register"),
        ("other group", "same process_group"),
    ],
)
def test_what_cannot_be_managed_is_refused_with_advice(two: Ranks, what: str, advice: str) -> None:
    for message in two.run(refusal, what):
        assert advice in message
