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

from ratchet_hooks import capture, register, restore
from ratchet_hooks.errors import LayoutMismatch, UnsupportedModel
from ratchet_hooks.manage.from_torch import spec_of
from ratchet_hooks.specs.hook_specs import PowerSGDSpec
from tests.support.gloo_ranks import Ranks
from tests.support.hook_cases import MANY_BUCKETS, Case
from tests.support.pytorch_recipe import resume_difference
from tests.support.registered_hook_runs import custom_hook_differences, leftovers_after_register, registered_differences
from tests.support.registrable_objects import refusal_message, spec_from

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
def test_registered_hook_resumes_exactly_in_every_ddp_configuration(two_ranks: Ranks, name: str) -> None:
    case = replace(CONFIGURATIONS[name], hook="powerSGD", cap=MANY_BUCKETS, spec=GUARDED)
    assert two_ranks.run(registered_differences, case, 6, 4) == [[], []]


def test_documented_example_resumes_exactly_with_three_ratchet_lines(two_ranks: Ranks) -> None:
    """The control is the example as it stands, with rank 0's hook state on all ranks."""
    assert min(two_ranks.run(resume_difference, "documented", 12, 5)) > 0.01
    assert two_ranks.run(resume_difference, "ratchet", 12, 5) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["plain", "static_views", "accumulation_views"])
def test_registered_custom_function_and_state_resume_exactly(two_ranks: Ranks, name: str) -> None:
    case = replace(CONFIGURATIONS[name], cap=MANY_BUCKETS)
    assert two_ranks.run(custom_hook_differences, case, 6, 4) == [[], []]


def test_resume_without_custom_hook_state_is_not_exact(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(partial(custom_hook_differences, forget=True), Case(), 6, 4))


def test_registering_replaces_previous_reducer_and_hook(two_ranks: Ranks) -> None:
    for seen in two_ranks.run(leftovers_after_register):
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


def test_registered_ddp_is_freed_after_last_reference(two_ranks: Ranks) -> None:
    assert two_ranks.run(left_behind) == [[False] * 3] * 2


def steps_after_refused_restore(rank: int, options: dict[str, Any]) -> tuple[int, bool, bool]:
    """After a restore with one bucket per parameter, which is impossible: iterations of the hook in two steps, whether gradients
    are this rank's own, as noop leaves them, and whether the buckets that are captured are restored into a new DDP."""

    def made() -> DistributedDataParallel:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), **options)
        register(ddp, "noop")
        return ddp

    ddp = made()
    tensors, data = capture(ddp)
    impossible: Any = {**cast(Any, data), "layout": [[name] for name, _ in ddp.module.named_parameters()]}
    with pytest.raises(LayoutMismatch):
        restore(ddp, (tensors, impossible))
    x = torch.full((2, 4), 1.0 + rank)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).sum().backward()
    first = cast(Any, ddp.module)[0].weight
    (own,) = torch.autograd.grad(ddp.module(x).sum(), [first])
    later = capture(ddp)
    again = made()
    restore(again, later)
    return cast(Any, later[1])["iteration"], torch.equal(first.grad, own), capture(again)[1] == later[1]


@pytest.mark.parametrize("option", [None, "static_graph", "find_unused_parameters"])
def test_ddp_keeps_its_hook_after_a_restore_that_is_refused(two_ranks: Ranks, option: str | None) -> None:
    options = {} if option is None else {option: True}
    assert two_ranks.run(steps_after_refused_restore, options) == [(2, True, True)] * 2


ASKED = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 8, "use_error_feedback": False, "random_seed": 5}
SPECS: dict[str, dict[str, Any]] = {
    "allreduce": {"name": "allreduce"},
    "fp16": {"name": "fp16_compress", "wrapper": None},
    "pertensor": {"name": "quantization_pertensor"},
    "powerSGD": {"name": "powerSGD", "wrapper": None, **ASKED},
    "wrapped": {"name": "powerSGD", "wrapper": "fp16_compress_wrapper", **ASKED},
    "wrapper": {"name": "powerSGD", "wrapper": "bf16_compress_wrapper", **ASKED, "warm_start": False},
}


def test_powersgd_state_with_used_generator_is_refused() -> None:
    state, nobody = PowerSGDState(None, random_seed=3), cast(Any, None)
    asked = spec_of(state, powerSGD_hook, nobody)
    assert asked is not None and asked["random_seed"] == 3
    state.rng.randint(10)
    with pytest.raises(UnsupportedModel, match="register a new state"):
        spec_of(state, powerSGD_hook, nobody)


@pytest.mark.parametrize("name", list(SPECS))
def test_spec_from_torch_state_keeps_its_parameters(two_ranks: Ranks, name: str) -> None:
    for found in two_ranks.run(spec_from, name):
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
def test_unsupported_ddp_is_refused_with_advice(two_ranks: Ranks, what: str, advice: str) -> None:
    for message in two_ranks.run(refusal_message, what):
        assert advice in message
