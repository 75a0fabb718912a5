"""torch's bits, error feedback's law, what must differ, and what must be refused - on real gloo groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ratchet_hooks.manage.managed_ddp import HookStateError, managed_ddp, redistribute
from ratchet_hooks.specs.hook_specs import AllreduceSpec, BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_hooks.specs.memory_estimate import hook_memory
from ratchet_hooks.state.files import load_state
from ratchet_worker.tasks.digits import DigitsTask, make_net
from tests.support import backward_faults
from tests.support import hook_faults as faults
from tests.support import hook_properties as laws
from tests.support.gloo_ranks import Ranks, run_ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case

COLD = PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=False)


@pytest.mark.parametrize(
    "case",
    [
        Case(hook="allreduce", cap=ONE_BUCKET),
        Case(hook="allreduce", cap=MANY_BUCKETS),
        Case(hook="allreduce", cap=MANY_BUCKETS, ddp={"gradient_as_bucket_view": True}, accumulate=2),
        Case(hook="fp16_compress", cap=ONE_BUCKET),
        Case(hook="fp16_compress", cap=MANY_BUCKETS),
    ],
    ids=lambda c: f"{c.hook}-{c.cap}-{len(c.ddp)}",
)
def test_managed_ddp_has_same_bits_as_plain_ddp(three_ranks: Ranks, case: Case) -> None:
    assert three_ranks.run(laws.differences_from_torch, case, 4) == [[], [], []]


def test_powersgd_has_same_bits_as_torch_hook_with_one_bucket(two_ranks: Ranks) -> None:
    # One thread everywhere, one bucket; the other layouts make torch's own hook hang or crash on gloo.
    spec = PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=2.0)
    assert two_ranks.run(laws.differences_from_torch, Case(hook="powerSGD", cap=ONE_BUCKET, spec=spec), 3) == [[], []]
    assert two_ranks.run(
        laws.differences_from_torch_in_one_thread, Case(hook="powerSGD", cap=ONE_BUCKET, spec=spec), 7
    ) == [[], []]


def test_powersgd_run_is_repeatable_with_varying_thread_counts(two_ranks: Ranks) -> None:
    assert two_ranks.run(laws.count_distinct_results, Case(hook="powerSGD", cap=ONE_BUCKET), 6, 5) == [1, 1]


def test_gradient_is_fully_split_into_update_and_residual(three_ranks: Ranks) -> None:
    answers = three_ranks.run(laws.check_residual_law, Case(hook="powerSGD", cap=MANY_BUCKETS), 5)
    assert [broken for broken, _, _ in answers] == [[], [], []]
    assert answers[0][1] == answers[1][1] == answers[2][1]  # all ranks apply the same gradient
    norms = [norm for _, _, norm in answers]
    assert min(norms) > 0 and len(set(norms)) == 3  # each keeps its own residual


@pytest.mark.parametrize("batched", [False, True], ids=["one-by-one", "batched"])
def test_p_and_q_are_stored_under_their_own_parameter(two_ranks: Ranks, batched: bool) -> None:
    assert two_ranks.run(laws.mismatched_factors, batched) == [[], []]


@pytest.mark.parametrize(
    ("change", "case", "kill", "pin"),
    [
        ("residual_of_rank_1", Case(hook="powerSGD", cap=MANY_BUCKETS), 5, True),
        ("q", Case(hook="powerSGD", cap=MANY_BUCKETS), 5, True),
        ("iteration", Case(hook="powerSGD", cap=MANY_BUCKETS), 5, True),
        ("rng", Case(hook="powerSGD", cap=MANY_BUCKETS), 2, True),
        ("rng", Case(hook="powerSGD", cap=MANY_BUCKETS, spec=COLD), 5, True),
        ("rank_1_rng", Case(hook="allreduce", cap=MANY_BUCKETS), 5, True),
        ("nothing", Case(hook="powerSGD", cap=MANY_BUCKETS), 5, False),
        ("nothing", Case(hook="allreduce", cap=MANY_BUCKETS), 5, False),
    ],
    ids=["residual", "q", "iteration", "rng-before-compression", "rng-cold-start", "rank-rng", "layout", "layout-allreduce"],
)  # fmt: skip
def test_resume_without_one_part_of_state_is_not_exact(
    three_ranks: Ranks, change: str, case: Case, kill: int, pin: bool
) -> None:
    answers = three_ranks.run(
        laws.resumes_identically_after, case, kill, kill + 3, getattr(laws, f"change_{change}"), pin
    )
    assert answers == [False, False, False]


def test_documented_torch_recipe_does_not_resume_exactly(three_ranks: Ranks) -> None:
    assert min(three_ranks.run(laws.documented_recipe_difference, 5, 10)) > 1e-3


def test_redistribution_keeps_the_mean_residual(three_ranks: Ranks, two_ranks: Ranks) -> None:
    case = Case(hook="powerSGD", cap=MANY_BUCKETS)
    arrays = three_ranks.run(laws.capture_all, case, 6)
    states = [({name: torch.from_numpy(a) for name, a in tensors.items()}, data) for tensors, data in arrays]
    tensors, data = redistribute(states)
    residuals = [name for name in tensors if name.startswith("residual/")]
    assert len(residuals) == 12
    for name in residuals:
        mean = np.mean([a[name].astype(np.float64) for a, _ in arrays], axis=0)
        assert np.array_equal(tensors[name].numpy(), mean.astype(np.float32))
    new = two_ranks.run(laws.restore_redistributed, case, {name: t.numpy() for name, t in tensors.items()}, data, 3)
    for rank in range(2):
        assert all(np.array_equal(new[rank][name], tensors[name].numpy()) for name in residuals)


def test_redistribution_refuses_states_of_different_checkpoints(two_ranks: Ranks) -> None:
    arrays = two_ranks.run(laws.capture_all, Case(hook="powerSGD"), 5)
    states = [({name: torch.from_numpy(a) for name, a in tensors.items()}, data) for tensors, data in arrays]
    states[1][0]["q/left.weight"][0, 0] += 1.0
    with pytest.raises(HookStateError) as caught:
        redistribute(states)
    assert caught.value.key == "q/left.weight"
    with pytest.raises(HookStateError, match="do not belong to one checkpoint"):
        redistribute([states[0], (states[0][0], {**states[0][1], "iteration": 4})])
    with pytest.raises(HookStateError):
        redistribute([])


def test_summary_has_figures_of_warm_up_and_compressing_phases(two_ranks: Ranks) -> None:
    warm_up, compressing = two_ranks.run(laws.summaries, Case(hook="powerSGD", cap=MANY_BUCKETS), [2, 6])[1]
    assert (warm_up["phase"], warm_up["iteration"], warm_up["compression_rate"]) == ("warm-up", 2, 1.0)
    assert warm_up["bytes_before"] == warm_up["bytes_after"] == compressing["bytes_before"] == 4 * 162_710
    assert (compressing["phase"], compressing["iteration"], compressing["rank"]) == ("compressing", 6, 1)
    # elements sent: r (n + m) of every compressed matrix, everything else as it is
    matrices = {"head": (10, 200), "first": (300, 64), "second": (200, 300), "left": (200, 200), "right": (200, 200)}
    saved = sum(n * m - 2 * (n + m) for n, m in matrices.values())
    assert compressing["bytes_after"] == 4 * (162_710 - saved)
    assert compressing["elements_before"] == 3 * 162_710 and compressing["elements_after"] == 3 * (162_710 - saved)
    assert compressing["compression_rate"] == 162_710 / (162_710 - saved)
    assert (
        compressing["residual_norm"] > 0 and compressing["memory_bytes"] > 4 * 162_710 and compressing["buckets"] >= 3
    )
    (half,) = two_ranks.run(laws.summaries, Case(hook="fp16_compress"), [1])[0]
    assert (half["phase"], half["bytes_before"], half["bytes_after"]) == ("steady", 4 * 162_710, 2 * 162_710)
    assert half["compression_rate"] == 1.0 and half["residual_norm"] is None


def test_fp16_overflow_is_reported_on_the_rank_of_origin(two_ranks: Ranks) -> None:
    quiet, loud = two_ranks.run(faults.overflow_warnings)
    assert quiet == []
    assert set(loud) == {("fp16-overflow", "bias", 2), ("fp16-overflow", "weight", 2)}


def test_all_zero_gradients_are_reported_unless_epsilon_is_set(two_ranks: Ranks) -> None:
    for warnings, finite in two_ranks.run(faults.zero_gradient_warnings, 0.0):
        assert warnings == {("non-finite", "spare.weight", 3)} and not finite
    assert two_ranks.run(faults.zero_gradient_warnings, 1e-8) == [(set(), True)] * 2


@pytest.mark.parametrize("name", list(faults.REFUSALS))
def test_setup_that_cannot_resume_exactly_is_refused(two_ranks: Ranks, name: str) -> None:
    assert all(faults.REFUSALS[name][3] in said for said in two_ranks.run(faults.construction_refusal, name))


def test_change_of_constructed_ddp_is_refused_and_sparse_gradient_explained(two_ranks: Ranks) -> None:
    for said in two_ranks.run(faults.refused_after_construction):
        assert "static_graph: true" in said[0] and "same number of batches" in said[1]
    assert all("sparse=False" in said for said in two_ranks.run(faults.sparse_gradient_error))


@pytest.mark.parametrize("late", [False, True], ids=["before-ddp", "after-ddp"])
def test_apex_amp_under_powersgd_is_refused(two_ranks: Ranks, late: bool) -> None:
    for spec in (PowerSGDSpec(), BatchedPowerSGDSpec()):
        for when, said in two_ranks.run(faults.refusal_under_apex, spec, late):
            assert when == ("first step" if late else "construction")
            assert "apex.amp is active" in said and "use torch.amp" in said
    assert two_ranks.run(faults.refusal_under_apex, AllreduceSpec(), late) == [("", "accepted")] * 2


def test_detached_gradient_view_is_a_user_error_with_advice(two_ranks: Ranks) -> None:
    for cause, said in two_ranks.run(faults.detached_view_error):
        assert cause == "user-error"  # no retry heals it
        assert "call optimizer.zero_grad()" in said and "gradient_as_bucket_view to false" in said


def test_static_graph_first_iteration_under_no_sync_is_refused(two_ranks: Ranks) -> None:
    assert all("must not be under no_sync" in said for said in two_ranks.run(faults.static_graph_no_sync_error))


def test_restore_of_mismatched_state_is_refused_with_key(two_ranks: Ranks) -> None:
    found: dict[str, Any] = two_ranks.run(faults.restore_mismatches)[0]
    keys = {what: key for what, (key, _) in found.items()}
    assert keys == {
        "newer": "version", "not a state": "version", "other hook": "hook", "other rank": "state.matrix_approximation_rank",
        "missing": "residual/left.weight", "reshaped": "residual/left.weight", "left over": "residual/none",
        "other model": "extra.weight", "other model at restore": "extra.weight", "other cap": keys["other cap"],
        "not pinned": "layout", "laid out anew": "",
    }  # fmt: skip
    assert "bucket_cap_mb" in found["other cap"][1] and "99" in found["newer"][1]


def test_bucket_of_other_layout_is_refused_without_touching_state(two_ranks: Ranks) -> None:
    for said, untouched in two_ranks.run(backward_faults.run_hook_on_foreign_bucket):
        assert "differs from the recorded layout" in said and untouched


def test_capture_during_backward_is_refused(two_ranks: Ranks) -> None:
    assert all("between steps" in said for said in two_ranks.run(backward_faults.capture_during_backward))


def test_capture_and_step_after_failed_backward_are_refused(two_ranks: Ranks) -> None:
    """In the first step that compresses, where some buckets have a residual then, P and Q and others have none."""
    for said in two_ranks.run(backward_faults.capture_after_failed_backward, {}, 3, "first.weight"):
        assert said["backward"] == "of the script"
        assert "in iteration 4, " in said["capture"] and "buckets went through" in said["capture"]
        assert "Expected to have finished reduction" in said["step"]
    assert two_ranks.run(backward_faults.capture_incomplete_state) == ["state.error_dict"] * 2


def test_static_graph_step_after_failed_first_backward_is_refused(two_ranks: Ranks) -> None:
    for said in two_ranks.run(backward_faults.capture_after_failed_backward, {"static_graph": True}, 0, "first.weight"):
        assert said["backward"] == "of the script" and said["capture"] == "accepted"  # nothing had changed yet
        assert "learns the graph" in said["step"]


def test_static_graph_allows_recomputation_in_first_backward(two_ranks: Ranks) -> None:
    assert two_ranks.run(backward_faults.gradients_with_recomputed_forward) == [[0.0] * 3] * 2


def test_compiled_static_graph_is_compiled_only_once(two_ranks: Ranks) -> None:
    two_ranks.run(backward_faults.train_compiled_static_graph, 12)


def test_docstring_script_resumes_exactly_in_new_processes(two_ranks: Ranks, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    two_ranks.run(faults.run_docstring_script, str(whole), 9)
    two_ranks.run(faults.run_docstring_script, str(cut), 5)
    run_ranks(2, faults.run_docstring_script, str(cut), 9)  # other processes: only the files carry state
    for rank in range(2):
        a, b = (load_file(d / f"rank-{rank}.safetensors") for d in (whole, cut))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        first, second = (load_state(d / f"rank-{rank}.safetensors") for d in (whole, cut))
        tensors, data = first["hook"]
        assert any(name.startswith("residual/") for name in tensors)
        assert data == second["hook"][1] and data["iteration"] == first["step"] == second["step"] == 9


def test_run_ranks_raises_the_failure_of_a_rank_and_works_again() -> None:
    with pytest.raises(AssertionError, match="said by rank one"):
        run_ranks(2, faults.fail_or_wait, "raise", deadline=20)
    with pytest.raises(AssertionError, match="exit code 7"):
        run_ranks(2, faults.fail_or_wait, "exit", deadline=20)
    assert [(rank, world) for rank, world, _ in run_ranks(2, faults.rank_environment)] == [(0, 2), (1, 2)]


def held(rank: int, spec: Any) -> int:
    """What the summary says the state of the digits' net holds, in one bucket, once it compresses."""
    net = make_net(8, 0.0)
    ddp, hook = managed_ddp(net, spec, ddp={"bucket_cap_mb": 25})
    for _ in range(3):
        ddp(torch.randn(4, 1, 8, 8)).square().mean().backward()
    return hook.summary(rank=rank, step=3).memory_bytes


@pytest.mark.parametrize(
    "spec",
    [
        PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=2),
        PowerSGDSpec(start_powerSGD_iter=0, use_error_feedback=False, warm_start=False, min_compression_rate=1.5),
        PowerSGDSpec(start_powerSGD_iter=2, wrapper="bf16_compress_wrapper"),
        BatchedPowerSGDSpec(matrix_approximation_rank=3, start_powerSGD_iter=2),
        AllreduceSpec(),
        AllreduceSpec(wrapper="fp16_compress_wrapper"),
    ],
    ids=["powerSGD", "no-feedback", "wrapped", "batched", "allreduce", "wrapped allreduce"],
)
def test_hook_memory_estimate_equals_memory_held(two_ranks: Ranks, spec: Any) -> None:
    estimate = hook_memory(spec, DigitsTask(width=8).parameter_shapes())
    assert two_ranks.run(held, spec) == [estimate, estimate]
