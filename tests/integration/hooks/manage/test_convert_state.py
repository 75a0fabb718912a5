"""Hook states in another group: with other ranks, under another hook, in an older format. What is kept is kept bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ratchet_hooks.algorithms.state_version import STATE_VERSION, check_data, same_bits
from ratchet_hooks.manage.convert_state import convert_state
from ratchet_hooks.manage.managed_ddp import HookStateError, redistribute
from ratchet_hooks.specs.compatibility import hook_change
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PostLocalSGDSpec, PowerSGDSpec
from ratchet_hooks.specs.registry import is_stateful
from tests.support import hook_conversion_cases
from tests.support.custom_hooks import import_example
from tests.support.gloo_ranks import Ranks
from tests.support.hook_conversion_cases import LOW, SPECS, START, State

STEPS = 5


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def states(four_ranks: Ranks) -> dict[str, list[State]]:
    """By name of a spec: the states of two ranks."""
    return {
        name: four_ranks.run(hook_conversion_cases.train_and_capture, 2, spec, STEPS)[:2]
        for name, spec in SPECS.items()
    }


def mean_of(parts: list[torch.Tensor]) -> torch.Tensor:
    return (sum(part.double() for part in parts) / len(parts)).to(parts[0].dtype)  # type: ignore[union-attr]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (4, 1), (1, 3)])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if is_stateful(spec)])
def test_mean_residual_is_kept_on_any_number_of_ranks(four_ranks: Ranks, name: str, before: int, after: int) -> None:
    import_example()
    spec = SPECS[name]
    old = [
        state
        for state in four_ranks.run(hook_conversion_cases.train_and_capture, before, spec, STEPS)
        if state is not None
    ]
    merged, data = redistribute(old, spec)
    residuals = [key for key in merged if "residual" in key]
    assert bool(residuals) is (name != "post_localSGD")
    assert ("residual_padding/0" in residuals) is name.startswith("batched")
    for key in residuals:
        parts = [tensors[key] for tensors, _ in old]
        mean = (
            torch.stack(parts).mean(0) if name == "custom" else mean_of(parts)
        )  # of a custom state as its class does it
        assert same_bits(merged[key], mean), key
        assert before == 1 or "padding" in key or not same_bits(merged[key], parts[0]), key
    answers = four_ranks.run(hook_conversion_cases.restore_in_new_group, after, spec, (merged, data))
    new = [answer for answer in answers if answer is not None]
    assert len(new) == after and all(sound for *_, sound in new)
    for key in residuals:
        assert same_bits(mean_of([state[0][key] for state, *_ in new]), merged[key]), key
    for (tensors, again), summary, _ in new:
        assert set(tensors) == set(old[0][0]) and of_any_group(again) == of_any_group(data)
        assert all(same_bits(tensors[key], old[0][0][key]) for key in tensors if key not in residuals)
        assert summary["iteration"] == STEPS and summary["averager_step"] in (None, STEPS)


def of_any_group(data: Any) -> Any:
    """The JSON part without the number of ranks that it tells of."""
    return {**data, "state": {key: value for key, value in data["state"].items() if key != "subgroup"}}


CHANGES: dict[str, tuple[str, HookSpec, set[str], str]] = {
    "rank": ("powerSGD", PowerSGDSpec(**{**LOW, "matrix_approximation_rank": 4}), {"residual"}, "reset: P and Q"),
    "rate": ("powerSGD", PowerSGDSpec(**LOW, min_compression_rate=4), {"residual"}, "reset: P and Q"),
    "epsilon": ("powerSGD", PowerSGDSpec(**LOW, orthogonalization_epsilon=1e-8), {"residual", "p", "q"}, "P and Q continue"),
    "start": ("powerSGD", PowerSGDSpec(**{**LOW, "start_powerSGD_iter": 9}), {"residual", "p", "q"}, "warm-up"),
    "no feedback": ("powerSGD", PowerSGDSpec(**LOW, use_error_feedback=False), {"p", "q"}, "are lost"),
    "cold": ("powerSGD", PowerSGDSpec(**LOW, warm_start=False), {"residual"}, "the iteration and the generator continue"),
    "batched": ("powerSGD", SPECS["batched_powerSGD"], {"residual"}, "powerSGD -> batched_powerSGD"),
    "unbatched": ("batched_powerSGD", SPECS["powerSGD"], {"residual"}, "batched_powerSGD -> powerSGD"),
    "wrapped": ("powerSGD", SPECS["powerSGD, fp16"], {"residual", "p", "q"}, "in the other dtype"),
    "unwrapped": ("powerSGD, fp16", SPECS["powerSGD"], {"residual", "p", "q"}, "in the other dtype"),
    "other bits": (  # under another rate, too, which batched_powerSGD does not use
        "batched_powerSGD, bf16", BatchedPowerSGDSpec(wrapper="fp16", min_compression_rate=4, **LOW),
        {"residual", "residual_padding", "p", "q"}, "dtype",
    ),
    "custom": (
        "custom",
        CustomSpec(hook="my_hooks:top_k_hook", state="my_hooks:TopKState", state_args={"density": 0.2}),
        {"custom"}, "all parts of the state continue",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_hook_carries_compatible_state(
    four_ranks: Ranks, states: dict[str, list[State]], change: str
) -> None:
    name, new, kept, words = CHANGES[change]
    old = states[name]
    told = hook_change(SPECS[name].name, SPECS[name].values(), new)
    assert told is not None and told.state == "carried" and words in f"{told.description}: {told.reason}"
    for rank, answer in enumerate(four_ranks.run(carried_by_two, SPECS[name], new, old)[:2]):
        assert answer is not None
        (_, made), (tensors, data), summary, sound = answer
        assert sound and summary["iteration"] == STEPS and data["hook"] == new.name and data["wrapper"] == new.wrapper
        assert summary["phase"] == (
            "steady" if change == "custom" else "warm-up" if change == "start" else "compressing"
        )
        assert data["state"] == made["state"] or change == "batched"  # of which the squares come later
        for key, tensor in old[rank][0].items():
            kind = key.partition("/")[0]
            if kind == "state":
                assert same_bits(tensors[key], tensor)
            elif kind in kept:
                assert same_bits(tensors[key], tensor.to(tensors[key].dtype)), key
                assert (tensors[key].dtype is tensor.dtype) is ("dtype" not in words)
            else:
                assert key not in tensors or not bool(tensors[key].any())


def test_carry_without_wrapper_casts_state_to_parameter_dtype(states: dict[str, list[State]]) -> None:
    old, new = SPECS["powerSGD, fp16"], SPECS["powerSGD"]
    tensors, data = states["powerSGD, fp16"][0]
    told = hook_change(old.name, old.values(), new)
    names = [key.partition("/")[2] for key in tensors if key.startswith("residual/")]
    assert told is not None
    out, _ = convert_state(tensors, data, told, old, new, dict.fromkeys(names, torch.zeros(1, dtype=torch.float64)))
    assert {t.dtype for key, t in out.items() if key.startswith(("residual/", "p/", "q/"))} == {torch.float64}


def carried_by_two(rank: int, old: HookSpec, new: HookSpec, states: list[State]) -> Any:
    hook_conversion_cases.first_ranks_group(2)
    return hook_conversion_cases.carry_to_new_hook(rank, old, new, states) if rank < 2 else None


@pytest.mark.parametrize(
    ("parameters", "phase", "warm_up"),
    [
        ({"start_localSGD_iter": START, "model_averaging_period": 2}, "local", START),
        ({"start_localSGD_iter": 20}, "warm-up", None),
        ({"start_localSGD_iter": START, "period_group_size_dict": {2: 2}}, "local", START),
    ],
)
def test_local_sgd_resumes_under_changed_parameters(
    four_ranks: Ranks, states: dict[str, list[State]], parameters: dict[str, Any], phase: str, warm_up: int | None
) -> None:
    new = PostLocalSGDSpec(subgroup_size=1, **parameters)
    for answer in four_ranks.run(carried_by_two, SPECS["post_localSGD"], new, states["post_localSGD"])[:2]:
        _, (_, data), summary, _ = answer
        assert (summary["phase"], summary["averager_step"]) == (phase, STEPS)
        assert data["state"]["averager"]["warm_up"] == warm_up
        assert data["state"]["slots"]["iter"] == (START if phase == "local" else STEPS)


def test_local_sgd_with_start_already_passed_averages_at_once(four_ranks: Ranks) -> None:
    late = PostLocalSGDSpec(start_localSGD_iter=50, subgroup_size=1)
    old = four_ranks.run(hook_conversion_cases.train_and_capture, 2, late, STEPS)[:2]
    new = PostLocalSGDSpec(start_localSGD_iter=3, subgroup_size=1, model_averaging_period=2)
    _, (_, data), summary, _ = four_ranks.run(carried_by_two, late, new, old)[1]
    assert summary["phase"] == "local" and data["state"]["averager"]["warm_up"] == STEPS
    assert summary["next_averaging"] == 1


_LOW = {
    "ranks": ("redistributed", "the mean of the old residuals, on every rank"),
    "layout": ("redistributed", "moved to other buckets by parameter name"),
}
_SAME = {"ranks": ("exact", ""), "layout": ("exact", "")}
REPORTS: dict[str, dict[str, tuple[str, str]]] = {
    "powerSGD": _LOW,
    "powerSGD, fp16": _LOW,
    "batched_powerSGD": {**_LOW, "layout": ("redistributed", "state of a whole bucket is reset")},
    "post_localSGD": {"ranks": ("redistributed", "the averager's step"), "layout": ("exact", "")},
    "custom": {"ranks": ("redistributed", "TopKState.redistribute"), "layout": ("refused", "on_hook_mismatch: reset")},
    "noop": _SAME,
    "allreduce": _SAME,
}


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("kind", ["same", "ranks", "layout", "reset"])
def test_resume_report_has_status_and_reason_of_hook_state(
    four_ranks: Ranks, states: dict[str, list[State]], name: str, kind: str
) -> None:
    spec = SPECS[name]
    expected = {**REPORTS[name], "same": ("exact", ""), "reset": ("reset", "asked for")}[kind]
    for status, reason in four_ranks.run(hook_conversion_cases.hook_resume_report, spec, states[name], spec, kind)[:2]:
        assert status == expected[0] and expected[1] in (reason or ""), reason
        assert (reason is None) is (status == "exact")


def test_resume_report_of_changed_hook_has_status_and_reason(four_ranks: Ranks, states: dict[str, list[State]]) -> None:
    other = PowerSGDSpec(**{**LOW, "matrix_approximation_rank": 3})
    for old, new, kind, status, words in (
        ("allreduce", SPECS["powerSGD"], "same", "absent", "starts afresh, including a warm-up"),
        ("allreduce", SPECS["noop"], "ranks", "absent", "no state was recorded, and none is kept"),
        ("allreduce", SPECS["custom"], "ranks", "absent", "hook allreduce -> custom"),
        (
            "powerSGD",
            other,
            "same",
            "redistributed",
            "hook.matrix_approximation_rank 2 -> 3: the residuals of all parameters",
        ),
        ("powerSGD", other, "ranks", "redistributed", "old ranks; hook.matrix_approximation_rank 2 -> 3"),
        ("powerSGD", SPECS["batched_powerSGD"], "layout", "redistributed", "moved to other buckets"),
        ("powerSGD", SPECS["noop"], "same", "refused", "nothing recorded can be carried over"),
    ):
        answer = four_ranks.run(hook_conversion_cases.hook_resume_report, new, states[old], SPECS[old], kind)[1]
        assert answer[0] == status and words in answer[1], answer


def test_carry_that_overflows_new_dtype_is_refused_with_key(states: dict[str, list[State]]) -> None:
    from ratchet_hooks.manage.convert_state import convert_state

    old, new = SPECS["powerSGD"], SPECS["powerSGD, fp16"]
    change = hook_change(old.name, old.values(), new)
    tensors, data = states["powerSGD"][0]
    parameters = {key.removeprefix("residual/"): t for key, t in tensors.items() if key.startswith("residual/")}
    large = tensors | {"residual/0.weight": tensors["residual/0.weight"] * 0 + 1e6}
    assert change is not None
    with pytest.raises(HookStateError, match=r"1e\+06, overflows torch.float16") as caught:
        convert_state(large, data, change, old, new, parameters)
    assert caught.value.key == "residual/0.weight"


def test_hook_state_of_other_format_version_is_refused(states: dict[str, list[State]]) -> None:
    data = states["powerSGD"][0][1]
    assert check_data(data, SPECS["powerSGD"])["version"] == STATE_VERSION == 2
    for version, words in (
        (STATE_VERSION + 1, "recorded in format 3"),
        (1, "recorded in format 1"),
        (0, "not a recorded"),
        ("1", "not a recorded"),
    ):
        with pytest.raises(HookStateError, match=words):
            check_data({**data, "version": version}, SPECS["powerSGD"])
