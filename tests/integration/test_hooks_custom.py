"""A user's own hook: its state comes back bit for bit, and what is wrong with it is said in its own words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ratchet_hooks.build import managed_ddp
from ratchet_hooks.custom import _tensors, redistribute
from ratchet_hooks.errors import CustomHookError, HookStateError
from ratchet_hooks.specs import AllreduceSpec, CustomSpec, PowerSGDSpec
from ratchet_hooks.states import redistribute as redistribute_all
from tests.support import custom_hooks
from tests.support.groups import Ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case, Run, differences, exact_resumes, same

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
    return exact_resumes(rank, a, total, kills)


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
def test_a_resume_changes_no_bit(two: Ranks, spec: CustomSpec, more: dict[str, Any]) -> None:
    assert two.run(resumes, case(spec, **more), 5, [1, 3]) == [{}, {}]


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


def test_without_its_state_or_with_another_ranks_the_result_is_another(two: Ranks) -> None:
    for dropped, swapped in two.run(without_state):
        assert "model.head.weight" in dropped and "model.head.weight" in swapped


def stock_and_ours(rank: int, path: str, spec: Any) -> bool:
    """Are a hook by path and the same one by name the same bits?"""
    ends = []
    for asked in (CustomSpec(hook=path), spec):
        run = Run(rank, Case(cap=MANY_BUCKETS, spec=asked))
        run.train(3)
        ends.append(run.module.state_dict())
    return all(same(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_view_is_read_where_its_elements_are(two: Ranks) -> None:
    """DDP reads a result from the beginning of its memory; torch itself would take the sevens that lie before this one."""
    assert two.run(stock_and_ours, f"{MINE}:gives_view", AllreduceSpec()) == [True, True]


def test_ranks_may_send_to_one_another_before_they_receive(two: Ranks) -> None:
    assert two.run(stock_and_ours, f"{MINE}:swaps", AllreduceSpec()) == [True, True]


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
def test_what_a_hook_does_wrong_is_said_with_its_name_and_bucket(
    two: Ranks, hook: str, code: str, words: list[str]
) -> None:
    for found, message, where in two.run(failing, CustomSpec(hook=f"{MINE}:{hook}")):
        assert found == code and [word for word in words if word not in message] == []
        assert f"{MINE}:{hook}" in message
        assert hook != "raises" or where == "raises"


def test_what_a_state_cannot_store_is_named_at_its_first_save(two: Ranks) -> None:
    spec = CustomSpec(hook=f"{MINE}:spoil", state=f"{MINE}:Nested")
    for key, message, _ in two.run(failing, spec):
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
def test_what_cannot_be_used_or_saved_is_known_when_the_job_starts(
    two: Ranks, more: dict[str, Any], about: str, words: str
) -> None:
    spec = CustomSpec(**{"hook": f"{MINE}:own", **more})
    for found, message in two.run(building, spec):
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


def test_a_state_that_does_not_fit_is_refused(two: Ranks) -> None:
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
        for found, message in two.run(restored, made, asked, cap):
            assert found == key and word in message


def summaries(rank: int, spec: CustomSpec) -> tuple[dict[str, Any], int, bool]:
    """The summary after two steps, bytes of the residuals, and whether the state has its process group."""
    custom_hooks.import_example()
    run = Run(rank, case(spec))
    run.train(2)
    state: Any = run.hook._algorithm.state
    held = sum(residual.nbytes for residual in getattr(state, "residuals", {}).values())
    return run.hook.summary(rank=rank, step=2).values(), held, getattr(state, "process_group", None) is not None


def test_a_summary_says_what_is_known_and_nothing_else(two: Ranks) -> None:
    for spec in (SMOOTHED, CustomSpec(hook=f"{MINE}:average")):
        for summary, _, _ in two.run(summaries, spec):
            assert summary["compression_rate"] is summary["elements_after"] is summary["bytes_after"] is None
            assert summary["bytes_before"] == 4 * summary["elements_before"] > 0 and summary["iteration"] == 2
    for summary, held, has_group in two.run(summaries, TOP_K):
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


def test_a_state_with_slots_is_counted_and_what_its_figures_raise_is_told(two: Ranks) -> None:
    assert [t.numel() for t in _tensors(Hidden())] == [5]
    for held, told, said in two.run(of_torch):
        assert held == told > 0
        assert "state: " in said and "PowerSGDState.compression_stats() is to give" in said


def captured(rank: int, spec: CustomSpec) -> Any:
    custom_hooks.import_example()
    run = Run(rank, case(spec))
    run.train(2)
    tensors, data = run.hook.capture()
    return tensors, data["state"]  # type: ignore[call-overload,index]


def test_states_of_several_ranks_become_one_where_their_class_says_how(two: Ranks) -> None:
    custom_hooks.import_example()
    states = two.run(captured, TOP_K)
    tensors, data = redistribute(TOP_K, states)
    names = [name for name in tensors if name.startswith("custom/residuals")]
    assert names and all(same(tensors[n], torch.stack([s[0][n] for s in states]).mean(0)) for n in names)
    assert data == states[0][1]
    with pytest.raises(HookStateError, match="no class method redistribute"):
        redistribute(SMOOTHED, two.run(captured, SMOOTHED))
    whole = [(tensors, {"hook": "custom", "iteration": 2, "state": state}) for tensors, state in states]
    assert redistribute_all(whole, TOP_K)[1] == {**whole[0][1], "state": data}
    with pytest.raises(HookStateError, match=r"rank 1: .* not of one checkpoint"):
        redistribute_all([whole[0], (whole[1][0], {**whole[1][1], "iteration": 3})], TOP_K)
