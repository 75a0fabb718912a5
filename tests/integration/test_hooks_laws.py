"""torch's bits, error feedback's law, what must differ, and what must be refused - on real gloo groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ratchet_hooks.build import HookStateError, managed_ddp, redistribute
from ratchet_hooks.files import load_state
from ratchet_hooks.memory import hook_memory
from ratchet_hooks.specs import AllreduceSpec, BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_worker.tasks.digits import DigitsTask, make_net
from tests.support import backward_faults
from tests.support import hook_faults as faults
from tests.support import hook_laws as laws
from tests.support.groups import Ranks, run_ranks
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
def test_the_bits_are_those_of_plain_ddp(three: Ranks, case: Case) -> None:
    assert three.run(laws.equals_stock, case, 4) == [[], [], []]


def test_powersgd_has_the_bits_of_torchs_hook_where_that_works(two: Ranks) -> None:
    # One thread everywhere, one bucket; the other layouts make torch's own hook hang or crash on gloo.
    spec = PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=2.0)
    assert two.run(laws.equals_stock, Case(hook="powerSGD", cap=ONE_BUCKET, spec=spec), 3) == [[], []]
    assert two.run(laws.equals_stock_in_one_thread, Case(hook="powerSGD", cap=ONE_BUCKET, spec=spec), 7) == [[], []]


def test_a_run_repeats_although_other_threads_have_other_thread_counts(two: Ranks) -> None:
    assert two.run(laws.repeats, Case(hook="powerSGD", cap=ONE_BUCKET), 6, 5) == [1, 1]


def test_what_went_in_is_applied_or_kept(three: Ranks) -> None:
    answers = three.run(laws.residual_law, Case(hook="powerSGD", cap=MANY_BUCKETS), 5)
    assert [broken for broken, _, _ in answers] == [[], [], []]
    assert answers[0][1] == answers[1][1] == answers[2][1]  # all ranks apply the same gradient
    norms = [norm for _, _, norm in answers]
    assert min(norms) > 0 and len(set(norms)) == 3  # each keeps its own residual


@pytest.mark.parametrize("batched", [False, True], ids=["one-by-one", "batched"])
def test_p_and_q_are_stored_under_their_own_parameter(two: Ranks, batched: bool) -> None:
    assert two.run(laws.factors, batched) == [[], []]


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
def test_without_one_part_the_bits_differ(three: Ranks, change: str, case: Case, kill: int, pin: bool) -> None:
    answers = three.run(laws.ablation, case, kill, kill + 3, getattr(laws, f"change_{change}"), pin)
    assert answers == [False, False, False]


def test_the_documented_recipe_differs(three: Ranks) -> None:
    assert min(three.run(laws.naive_recipe, 5, 10)) > 1e-3


def test_redistribution_keeps_the_mean_residual(three: Ranks, two: Ranks) -> None:
    case = Case(hook="powerSGD", cap=MANY_BUCKETS)
    arrays = three.run(laws.capture_all, case, 6)
    states = [({name: torch.from_numpy(a) for name, a in tensors.items()}, data) for tensors, data in arrays]
    tensors, data = redistribute(states)
    residuals = [name for name in tensors if name.startswith("residual/")]
    assert len(residuals) == 12
    for name in residuals:
        mean = np.mean([a[name].astype(np.float64) for a, _ in arrays], axis=0)
        assert np.array_equal(tensors[name].numpy(), mean.astype(np.float32))
    new = two.run(laws.restore_redistributed, case, {name: t.numpy() for name, t in tensors.items()}, data, 3)
    for rank in range(2):
        assert all(np.array_equal(new[rank][name], tensors[name].numpy()) for name in residuals)


def test_redistribution_refuses_states_that_do_not_belong_together(two: Ranks) -> None:
    arrays = two.run(laws.capture_all, Case(hook="powerSGD"), 5)
    states = [({name: torch.from_numpy(a) for name, a in tensors.items()}, data) for tensors, data in arrays]
    states[1][0]["q/left.weight"][0, 0] += 1.0
    with pytest.raises(HookStateError) as caught:
        redistribute(states)
    assert caught.value.key == "q/left.weight"
    with pytest.raises(HookStateError, match="not of one checkpoint"):
        redistribute([states[0], (states[0][0], {**states[0][1], "iteration": 4})])
    with pytest.raises(HookStateError):
        redistribute([])


def test_summary_follows_the_phases(two: Ranks) -> None:
    warm_up, compressing = two.run(laws.summaries, Case(hook="powerSGD", cap=MANY_BUCKETS), [2, 6])[1]
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
    (half,) = two.run(laws.summaries, Case(hook="fp16_compress"), [1])[0]
    assert (half["phase"], half["bytes_before"], half["bytes_after"]) == ("steady", 4 * 162_710, 2 * 162_710)
    assert half["compression_rate"] == 1.0 and half["residual_norm"] is None


def test_overflow_in_half_precision_is_reported_where_it_happens(two: Ranks) -> None:
    quiet, loud = two.run(faults.overflow_warnings)
    assert quiet == []
    assert set(loud) == {("fp16-overflow", "bias", 2), ("fp16-overflow", "weight", 2)}


def test_all_zero_gradients_under_powersgd_are_reported_and_epsilon_cures_them(two: Ranks) -> None:
    for warnings, finite in two.run(faults.zero_gradient_warnings, 0.0):
        assert warnings == {("non-finite", "spare.weight", 3)} and not finite
    assert two.run(faults.zero_gradient_warnings, 1e-8) == [(set(), True)] * 2


@pytest.mark.parametrize("name", list(faults.REFUSALS))
def test_what_cannot_be_exact_is_refused(two: Ranks, name: str) -> None:
    assert all(faults.REFUSALS[name][3] in said for said in two.run(faults.refused, name))


def test_what_would_change_a_standing_ddp_is_refused_and_a_sparse_gradient_explained(two: Ranks) -> None:
    for said in two.run(faults.refused_after_construction):
        assert "static_graph: true" in said[0] and "same number of batches" in said[1]
    assert all("sparse=False" in said for said in two.run(faults.sparse_by_function))


@pytest.mark.parametrize("late", [False, True], ids=["before-ddp", "after-ddp"])
def test_apex_amp_under_powersgd_is_refused(two: Ranks, late: bool) -> None:
    for spec in (PowerSGDSpec(), BatchedPowerSGDSpec()):
        for when, said in two.run(faults.under_apex, spec, late):
            assert when == ("first step" if late else "construction")
            assert "apex.amp is active" in said and "use torch.amp" in said
    assert two.run(faults.under_apex, AllreduceSpec(), late) == [("", "accepted")] * 2


def test_a_detached_gradient_view_is_told_with_what_helps(two: Ranks) -> None:
    for cause, said in two.run(faults.detached_view):
        assert cause == "user-error"  # no retry heals it
        assert "call optimizer.zero_grad()" in said and "gradient_as_bucket_view to false" in said


def test_static_graph_does_not_accumulate_while_it_learns(two: Ranks) -> None:
    assert all("must not be under no_sync" in said for said in two.run(faults.static_graph_under_no_sync))


def test_a_state_does_not_go_into_the_wrong_place(two: Ranks) -> None:
    found: dict[str, Any] = two.run(faults.mismatches)[0]
    keys = {what: key for what, (key, _) in found.items()}
    assert keys == {
        "newer": "version", "not a state": "version", "other hook": "hook", "other rank": "state.matrix_approximation_rank",
        "missing": "residual/left.weight", "reshaped": "residual/left.weight", "left over": "residual/none",
        "other model": "extra.weight", "other model at restore": "extra.weight", "other cap": keys["other cap"],
        "not pinned": "layout", "laid out anew": "",
    }  # fmt: skip
    assert "bucket_cap_mb" in found["other cap"][1] and "99" in found["newer"][1]


def test_a_bucket_of_another_layout_is_refused_before_it_meets_the_state(two: Ranks) -> None:
    for said, untouched in two.run(backward_faults.foreign_bucket):
        assert "differs from the recorded layout" in said and untouched


def test_capture_during_backward_is_refused(two: Ranks) -> None:
    assert all("between steps" in said for said in two.run(backward_faults.capture_mid_backward))


def test_a_backward_that_failed_half_way_leaves_nothing_that_is_saved_or_trained_on(two: Ranks) -> None:
    """In the first step that compresses, where some buckets have a residual then, P and Q and others have none."""
    for said in two.run(backward_faults.caught_in_backward, {}, 3, "first.weight"):
        assert said["backward"] == "of the script"
        assert "of iteration 4 " in said["capture"] and "buckets went through" in said["capture"]
        assert "Expected to have finished reduction" in said["step"]
    assert two.run(backward_faults.half_a_state) == ["state.error_dict"] * 2


def test_static_graph_does_not_train_apart_behind_a_first_backward_that_failed(two: Ranks) -> None:
    for said in two.run(backward_faults.caught_in_backward, {"static_graph": True}, 0, "first.weight"):
        assert said["backward"] == "of the script" and said["capture"] == "accepted"  # nothing had changed yet
        assert "learns the graph" in said["step"]


def test_a_static_graph_may_be_computed_again_in_its_first_backward(two: Ranks) -> None:
    assert two.run(backward_faults.recomputed_in_first_backward) == [[0.0] * 3] * 2


def test_a_compiled_static_graph_is_compiled_once_for_all_steps(two: Ranks) -> None:
    two.run(backward_faults.compiled_static_graph, 12)


def test_the_docstrings_script_resumes_in_new_processes(two: Ranks, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    two.run(faults.save_to_disk, str(whole), 9)
    two.run(faults.save_to_disk, str(cut), 5)
    run_ranks(2, faults.save_to_disk, str(cut), 9)  # other processes: only the files carry state
    for rank in range(2):
        a, b = (load_file(d / f"rank-{rank}.safetensors") for d in (whole, cut))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        first, second = (load_state(d / f"rank-{rank}.safetensors") for d in (whole, cut))
        tensors, data = first["hook"]
        assert any(name.startswith("residual/") for name in tensors)
        assert data == second["hook"][1] and data["iteration"] == first["step"] == second["step"] == 9


def test_ranks_report_failures_and_leave_nothing_behind() -> None:
    with pytest.raises(AssertionError, match="said by rank one"):
        run_ranks(2, faults.die_or_wait, "raise", deadline=20)
    with pytest.raises(AssertionError, match="exit code 7"):
        run_ranks(2, faults.die_or_wait, "exit", deadline=20)
    assert [(rank, world) for rank, world, _ in run_ranks(2, faults.environment)] == [(0, 2), (1, 2)]


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
def test_memory_is_estimated_as_it_will_be(two: Ranks, spec: Any) -> None:
    estimate = hook_memory(spec, DigitsTask(width=8).parameter_shapes())
    assert two.run(held, spec) == [estimate, estimate]
