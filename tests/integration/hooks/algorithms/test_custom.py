"""A user's own hook: its state comes back bit for bit, and what is wrong with it is said in its own words."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ratchet_hooks import torch_compat
from ratchet_hooks.algorithms.custom import _tensors, redistribute
from ratchet_hooks.algorithms.state_version import redistribute as redistribute_all
from ratchet_hooks.errors import CustomHookError, HookStateError
from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import AllreduceSpec, CustomSpec, PowerSGDSpec
from tests.support import custom_hooks
from tests.support.gloo_ranks import Ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case, Run, bitwise_equal, differences, resume_differences

MINE = "tests.support.custom_hooks"
TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
TOP_K = CustomSpec(hook="my_hooks:top_k_hook", state="my_hooks:TopKState", state_args={"density": 0.1})
SMOOTHED = CustomSpec(hook=f"{MINE}:smoothed", state=f"{MINE}:Counting", state_args={"decay": 0.25})
TORCHS_POWERSGD = CustomSpec(
    hook=f"{TORCH}.powerSGD_hook:powerSGD_hook",
    state=f"{TORCH}.powerSGD_hook:PowerSGDState",
    state_args={"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
)


def case(spec: CustomSpec, **more: Any) -> Case:
    return Case(cap=MANY_BUCKETS, spec=spec, **more)


def resumes(rank: int, a: Case, total: int, kills: list[int]) -> dict[int, list[str]]:
    custom_hooks.import_example()
    return resume_differences(rank, a, total, kills)


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        (TOP_K, {}),
        (TOP_K, {"ddp": {"static_graph": True}}),
        (TOP_K, {"ddp": {"find_unused_parameters": True}, "unused": True, "turn": 3}),
        (TOP_K, {"ddp": {"gradient_as_bucket_view": True}, "accumulate": 2}),
        (SMOOTHED, {}),
        (CustomSpec(hook=f"{MINE}:regrouped", state=f"{MINE}:Regrouped"), {}),
        (TORCHS_POWERSGD, {}),
        (CustomSpec(hook=f"{TORCH}.default_hooks:fp16_compress_hook"), {}),
        (replace(TOP_K, wrapper="bf16_compress_wrapper"), {}),
        (CustomSpec(hook=f"{MINE}:changes_per_rank", replicas="rank"), {}),
    ],
    ids=[
        "top-k",
        "static-graph",
        "unused",
        "views",
        "state-dict",
        "group-saved-as-none",
        "torchs-powersgd",
        "torchs-fp16",
        "wrapped",
        "replicas-differ",
    ],
)
def test_custom_hook_resume_is_bitwise_exact(two_ranks: Ranks, spec: CustomSpec, more: dict[str, Any]) -> None:
    assert two_ranks.run(resumes, case(spec, **more), 5, [1, 3]) == [{}, {}]


def without_state(rank: int) -> tuple[list[str], list[str]]:
    """What differs after two more steps when the state is dropped at step 2, and when rank 0's is given to every rank."""
    custom_hooks.import_example()
    whole = Run(rank, case(TOP_K))
    whole.train(2)
    checkpoint = whole.save()
    whole.train(4)
    expected = whole.save()
    out = []
    for swap in (False, True):
        resumed = Run(rank, case(TOP_K), checkpoint)
        state: Any = resumed.hook._algorithm.state
        if swap:
            for residual in state.residuals.values():
                torch.distributed.broadcast(residual, 0)
        else:
            state.residuals.clear()
        resumed.train(4)
        out.append(differences(expected, resumed.save()))
    return out[0], out[1]


def test_resume_with_dropped_or_swapped_hook_state_is_not_exact(two_ranks: Ranks) -> None:
    for dropped, swapped in two_ranks.run(without_state):
        assert "model.head.weight" in dropped and "model.head.weight" in swapped


def stock_and_ours(rank: int, path: str, spec: Any) -> bool:
    """Are a hook by path and the same one by name the same bits?"""
    ends = []
    for asked in (CustomSpec(hook=path), spec):
        run = Run(rank, Case(cap=MANY_BUCKETS, spec=asked))
        run.train(3)
        ends.append(run.module.state_dict())
    return all(bitwise_equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_hook_returning_a_view_is_read_at_the_views_elements(two_ranks: Ranks) -> None:
    """DDP reads a result from the beginning of its memory; torch itself would take the sevens that lie before this one."""
    assert two_ranks.run(stock_and_ours, f"{MINE}:gives_view", AllreduceSpec()) == [True, True]


def test_hook_may_send_to_peer_rank_before_receiving(two_ranks: Ranks) -> None:
    assert two_ranks.run(stock_and_ours, f"{MINE}:swaps", AllreduceSpec()) == [True, True]


def failing(rank: int, spec: CustomSpec) -> tuple[str, str, str]:
    """(code or key, message, innermost function) of the error that a user's hook ends the first step with."""
    run = Run(rank, case(spec))
    try:
        run.train(1)
        run.save()
    except (CustomHookError, HookStateError) as error:
        innermost: BaseException = error
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        trace = innermost.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else trace.tb_frame.f_code.co_name
        return (error.code if isinstance(error, CustomHookError) else error.key), str(error), where
    return "", "nothing failed", ""


@pytest.mark.parametrize(
    ("hook", "code", "words"),
    [
        (
            "raises",
            "hook-failed",
            ["raises in bucket 0 (", "KeyError: 'nothing here'", "custom_hooks.py, line"],
        ),
        ("raises_later", "hook-failed", ["in bucket 0", "ZeroDivisionError"]),
        ("gives_list", "hook-result", ["list of one tensor", ".then(lambda"]),
        ("gives_none", "hook-result", ["returned a NoneType", "torch.futures.Future"]),
        ("gives_half", "hook-result", ["torch.float16", "torch.float32"]),
        ("gives_short", "hook-result", ["DDP needs ["]),
        ("gives_number", "hook-result", ["holds a float, not a tensor"]),
    ],
)
def test_failing_hook_is_reported_with_code_hook_name_and_bucket(
    two_ranks: Ranks, hook: str, code: str, words: list[str]
) -> None:
    for found, message, where in two_ranks.run(failing, CustomSpec(hook=f"{MINE}:{hook}")):
        assert found == code and [word for word in words if word not in message] == []
        assert f"{MINE}:{hook}" in message
        assert hook != "raises" or where == "raises"


def without_dispatch_mode(rank: int) -> str:
    """The error of a step on a torch without the part that a user's hook runs in."""
    run = Run(rank, case(SMOOTHED))
    torch_compat._after_collectives.cache_clear()
    with patch.dict(sys.modules, {"torch.utils._python_dispatch": None}):
        try:
            run.train(1)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing failed"


def test_unsuitable_torch_is_not_reported_as_failure_of_the_hook(two_ranks: Ranks) -> None:
    for said in two_ranks.run(without_dispatch_mode):
        assert said.startswith("TorchUnsupported: ") and "has no torch.utils._python_dispatch.TorchDispatchMode" in said


def test_unserialisable_hook_state_is_named_at_first_save(two_ranks: Ranks) -> None:
    spec = CustomSpec(hook=f"{MINE}:spoil", state=f"{MINE}:Nested")
    for key, message, _ in two_ranks.run(failing, spec):
        assert key == "state.foo[0].bar"
        assert "_thread.lock" in message and f"{MINE}:Nested" in message and "leave it out" in message


def building(rank: int, spec: CustomSpec) -> tuple[str, str]:
    try:
        managed_ddp(torch.nn.Linear(2, 2), spec)
    except CustomHookError as error:
        return f"{error.key} {error.code}", str(error)
    except HookStateError as error:
        return error.key, str(error)
    return "", "it was built"


@pytest.mark.parametrize(
    ("more", "about", "words"),
    [
        ({"hook": "nowhere_at_all.hooks:f"}, "hook hook-import-failed", "no module named 'nowhere_at_all'"),
        ({"hook": f"{MINE}:nothing"}, "hook hook-import-failed", "has no 'nothing'"),
        ({"hook": f"{MINE}:one_argument"}, "hook hook-signature", "(bucket: 'Any')"),
        ({"hook": f"{MINE}:sleeps"}, "hook hook-signature", "coroutine"),
        ({"hook": f"{MINE}:Counting"}, "hook hook-signature", "is a class"),
        ({"hook": f"{MINE}:EXAMPLE"}, "hook hook-signature", "Path, not a function"),
        ({"state": f"{MINE}:own"}, "state hook-state-unsupported", "name the class"),
        ({"state": f"{MINE}:Plain"}, "state hook-state-unsupported", "neither __getstate__"),
        ({"state": f"{MINE}:Counting", "state_args": {"rate": 1}}, "state_args hook-state-arguments", "'rate'"),
        ({"state": f"{MINE}:WithGroup"}, "state.process_group", "process_group is set again after a resume"),
        ({"state": f"{MINE}:Nested", "state_args": {"at_once": True}}, "state.foo[0].bar", "_thread.lock"),
    ],
)
def test_invalid_custom_hook_spec_is_refused_at_start(
    two_ranks: Ranks, more: dict[str, Any], about: str, words: str
) -> None:
    spec = CustomSpec(**{"hook": f"{MINE}:own", **more})
    for found, message in two_ranks.run(building, spec):
        assert found == about and words in message


def restored(rank: int, made: CustomSpec, asked: CustomSpec, cap: float) -> tuple[str, str]:
    """What a state captured under ``made`` becomes under ``asked``, on buckets of ``cap``."""
    run = Run(rank, case(made))
    run.train(2)
    checkpoint = run.save()
    pin = cap == MANY_BUCKETS
    try:
        Run(rank, Case(cap=cap, spec=asked), checkpoint, pin=pin)
    except HookStateError as error:
        return error.key, str(error)
    return "", "it came back"


def test_restore_of_mismatched_hook_state_is_refused(two_ranks: Ranks) -> None:
    fixed = CustomSpec(hook=f"{MINE}:own", state=f"{MINE}:Fixed")
    stateless = CustomSpec(hook=f"{MINE}:own")
    for made, asked, cap, key, word in (
        (SMOOTHED, SMOOTHED, 0.2, "state.layout", "other"),
        (SMOOTHED, fixed, MANY_BUCKETS, "state.class", "Counting"),
        (fixed, fixed, MANY_BUCKETS, "state", "KeyError"),
        (SMOOTHED, stateless, MANY_BUCKETS, "custom/before[0]", "keeps no state"),
        (stateless, SMOOTHED, MANY_BUCKETS, "state", "not a recorded state"),
        (SMOOTHED, PowerSGDSpec(), MANY_BUCKETS, "hook", "custom"),
    ):
        for found, message in two_ranks.run(restored, made, asked, cap):
            assert found == key and word in message


def summaries(rank: int, spec: CustomSpec) -> tuple[dict[str, Any], int, bool]:
    """The summary after two steps, bytes of the residuals, and whether the state has its process group."""
    custom_hooks.import_example()
    run = Run(rank, case(spec))
    run.train(2)
    state: Any = run.hook._algorithm.state
    held = sum(residual.nbytes for residual in getattr(state, "residuals", {}).values())
    return run.hook.summary(rank=rank, step=2).values(), held, getattr(state, "process_group", None) is not None


def test_summary_leaves_unknown_compression_figures_none(two_ranks: Ranks) -> None:
    for spec in (SMOOTHED, CustomSpec(hook=f"{MINE}:average")):
        for summary, _, _ in two_ranks.run(summaries, spec):
            assert summary["compression_rate"] is summary["elements_after"] is summary["bytes_after"] is None
            assert summary["bytes_before"] == 4 * summary["elements_before"] > 0 and summary["iteration"] == 2
    for summary, held, has_group in two_ranks.run(summaries, TOP_K):
        assert summary["compression_rate"] == summary["elements_before"] / summary["elements_after"] > 2
        assert summary["memory_bytes"] == held == 4 * summary["elements_before"] / 2 and has_group


class Hidden:
    """A slot whose name Python mangles."""

    __slots__ = ("__kept",)

    def __init__(self) -> None:
        self.__kept = torch.zeros(5)


def of_torch(rank: int) -> tuple[int, int, str]:
    """Bytes that torch's own state, whose attributes are slots, holds and is said to hold; and what its failing figures say."""
    module = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
    spec = CustomSpec(
        hook=f"{module}:powerSGD_hook", state=f"{module}:PowerSGDState",
        state_args={"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
    )  # fmt: skip
    run = Run(rank, Case(hook="custom", cap=ONE_BUCKET, spec=spec))
    run.train(4)
    state: Any = run.hook._algorithm.state  # type: ignore[attr-defined]
    held = [t for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict) for t in kept.values()]
    told = run.hook.summary(rank=rank, step=4).memory_bytes
    state.total_numel_after_compression = "lost"
    try:
        run.hook.summary(rank=rank, step=4)
    except CustomHookError as error:
        return sum(t.nbytes for t in held), told, f"{error.key}: {error}"
    return 0, told, "accepted"


def test_state_with_slots_is_measured_and_compression_stats_error_reported(two_ranks: Ranks) -> None:
    assert [t.numel() for t in _tensors(Hidden())] == [5]
    for held, told, said in two_ranks.run(of_torch):
        assert held == told > 0
        assert "state: " in said and "PowerSGDState.compression_stats() must give" in said


def captured(rank: int, spec: CustomSpec) -> Any:
    custom_hooks.import_example()
    run = Run(rank, case(spec))
    run.train(2)
    tensors, data = run.hook.capture()
    return tensors, data["state"]  # type: ignore[call-overload,index]


def test_redistribute_merges_states_by_class_method_or_is_refused(two_ranks: Ranks) -> None:
    custom_hooks.import_example()
    states = two_ranks.run(captured, TOP_K)
    tensors, data = redistribute(TOP_K, states)
    names = [name for name in tensors if name.startswith("custom/residuals")]
    assert names and all(bitwise_equal(tensors[n], torch.stack([s[0][n] for s in states]).mean(0)) for n in names)
    assert data == states[0][1]
    with pytest.raises(HookStateError, match="no class method redistribute"):
        redistribute(SMOOTHED, two_ranks.run(captured, SMOOTHED))
    whole = [(tensors, {"hook": "custom", "iteration": 2, "state": state}) for tensors, state in states]
    assert redistribute_all(whole, TOP_K)[1] == {**whole[0][1], "state": data}
    with pytest.raises(HookStateError, match=r"rank 1: .* do not belong to one checkpoint"):
        redistribute_all([whole[0], (whole[1][0], {**whole[1][1], "iteration": 3})], TOP_K)
