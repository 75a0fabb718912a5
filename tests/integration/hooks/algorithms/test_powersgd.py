"""PowerSGD and batched PowerSGD have the bits of torch's code, and what overflows in them is named - on real gloo groups."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ratchet_hooks.algorithms.powersgd.kernels import Basis, OuterProduct, TransposedProduct, Tried
from ratchet_hooks.algorithms.state_version import same_bits
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, PowerSGDSpec
from tests.support import low_rank_cases as laws
from tests.support.gloo_ranks import Ranks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SWITCHES = [
    {"matrix_approximation_rank": rank, "use_error_feedback": feedback, "warm_start": warm, "start_powerSGD_iter": 2}
    for rank, feedback, warm in itertools.product((1, 2, 4), (True, False), (True, False))
]
"""Ranks 1 and 2 are orthonormalised by Gram-Schmidt, 4 by QR where there is one."""


def powersgd_cases() -> list[tuple[laws.Spec, torch.dtype]]:
    """All switches, batched and not; every dtype, with and without epsilon, meets each of them somewhere."""
    made = itertools.product(SWITCHES, (False, True))
    return [
        (
            PowerSGDSpec(
                **switches, batch_tensors_with_same_shape=batched, orthogonalization_epsilon=1e-6 if i % 3 == 0 else 0.0
            ),
            DTYPES[(i + i // 4) % 4],
        )
        for i, (switches, batched) in enumerate(made)
    ]


def test_powersgd_has_same_bits_and_state_as_torch(two_ranks: Ranks) -> None:
    assert two_ranks.run(laws.differences_from_torch, powersgd_cases(), 6) == [[], []]


def test_batched_powersgd_has_same_bits_as_torch(two_ranks: Ranks) -> None:
    cases = [(BatchedPowerSGDSpec(**switches), DTYPES[(i + i // 4) % 4]) for i, switches in enumerate(SWITCHES)]
    assert two_ranks.run(laws.differences_from_torch, cases, 6) == [[], []]


def test_powersgd_has_torch_bits_for_matrices_multiplied_by_column(two_ranks: Ranks) -> None:
    switches = [SWITCHES[4], SWITCHES[8]]  # of rank 2 and 4
    cases = [
        (spec(**one), dtype)
        for spec, one, dtype in itertools.product(
            (PowerSGDSpec, BatchedPowerSGDSpec), switches, (torch.float32, torch.float64)
        )
    ]
    assert two_ranks.run(laws.differences_from_torch, cases, 5, False, laws.LARGE) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_transposed_product_by_column_has_bits_of_one_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tried: Tried = {}
    for n, m, rank, place in itertools.product((256, 301), (512, 257), (1, 2, 3, 5), (0, 3)):
        matrix, p, q = (
            torch.randn(place + rows * columns, generator=generator).to(dtype)[place:].view(rows, columns)
            for rows, columns in ((n, m), (n, rank), (m, rank))
        )
        TransposedProduct(matrix, p, q, tried).compute()
        made = q.clone()
        torch.mm(matrix.t(), p, out=q)
        assert same_bits(made, q), (n, m, rank, place)


def test_transposed_product_rejects_columns_that_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch.mv adds up in another order, or from another zero, than torch.mm."""
    matrix, p, q = torch.randn(256, 512), torch.randn(256, 2), torch.empty(512, 2)

    def backwards(m: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((m.double() @ v.double()).float())

    def from_another_zero(m: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(m, v.unsqueeze(1), out=out.unsqueeze(1))
        out.copy_(torch.where(out == 0, -0.0, out))

    for other in (backwards, from_another_zero):
        monkeypatch.setattr(torch, "mv", other)
        TransposedProduct(matrix, p, q, {}).compute()
        assert same_bits(q, torch.mm(matrix.t(), p)), other


def test_product_choice_is_tried_per_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the small products add up in another order where there is one thread."""
    before, mv, bmm = torch.get_num_threads(), torch.mv, torch.bmm
    matrix, p, q, average = torch.randn(256, 512), torch.randn(256, 3), torch.randn(512, 3), torch.empty(1, 256, 512)
    tried: Tried = {}

    def other_mv(m: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        mv(m, v, out=out) if torch.get_num_threads() > 1 else out.copy_((m.double() @ v.double()).float())

    def other_bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        backwards = len(a) > 1 and torch.get_num_threads() == 1
        bmm(a.flip(-1), b.flip(-2), out=out) if backwards else bmm(a, b, out=out)

    monkeypatch.setattr(torch, "mv", other_mv)
    monkeypatch.setattr(torch, "bmm", other_bmm)
    try:
        for threads in (2, 1):  # each time as a plan of another bucket does
            torch.set_num_threads(threads)
            TransposedProduct(matrix, p, q, tried).compute()
            assert same_bits(q, torch.mm(matrix.t(), p)), threads
            OuterProduct(average, p.unsqueeze(0), q.unsqueeze(0), tried).compute()
            assert same_bits(average, bmm(p.unsqueeze(0), q.t().unsqueeze(0))), threads
    finally:
        torch.set_num_threads(before)


def test_transposed_product_rejects_columns_with_mixed_denormal_flushing() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matrix, p, q = torch.randn(512, 512) * 1e-20, torch.randn(512, 2) * 1e-20, torch.empty(512, 2)
        torch.mm(matrix, matrix)  # the second thread begins, without
        torch.set_flush_denormal(True)
        TransposedProduct(matrix, p, q, {}).compute()
        assert same_bits(q, torch.mm(matrix.t(), p))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_outer_product_by_row_blocks_has_bits_of_one_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tried: Tried = {}
    for n, m, rank, place in itertools.product((256, 301), (512, 257), (1, 2, 4, 7), (0, 3)):
        p, q, average = (
            torch.randn(place + rows * columns, generator=generator).to(dtype)[place:].view(1, rows, columns)
            for rows, columns in ((n, rank), (m, rank), (n, m))
        )
        p[:, ::3], q[:, ::2, 0] = 0.0, -0.0
        OuterProduct(average, p, q, tried).compute()
        assert same_bits(average, torch.bmm(p, q.mT)), (n, m, rank, place)


def test_outer_product_rejects_blocks_that_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a batch of small products adds up in another order, or from another zero, than one large one."""
    p, q, average = torch.randn(1, 256, 3), torch.randn(1, 512, 3), torch.empty(1, 256, 512)
    p[:, 7], bmm = 0.0, torch.bmm

    def backwards(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        bmm(a.flip(-1), b.flip(-2), out=out) if len(a) > 1 else bmm(a, b, out=out)

    def from_another_zero(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        bmm(a, b, out=out)
        if len(a) > 1:
            out.copy_(torch.where(out == 0, -0.0, out))

    for other in (backwards, from_another_zero):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "bmm", other)
            OuterProduct(average, p, q, {}).compute()
        assert same_bits(average, torch.bmm(p, q.mT)), other


def test_failed_backward_pass_leaves_no_powersgd_state_behind(two_ranks: Ranks) -> None:
    assert two_ranks.run(laws.recovers_after_aborted_step, PowerSGDSpec(start_powerSGD_iter=2)) == [True, True]


@pytest.mark.parametrize("alone", [False, True], ids=["three-ranks", "one-rank"])
def test_powersgd_has_torch_bits_on_three_ranks_and_on_one(three_ranks: Ranks, alone: bool) -> None:
    switches = SWITCHES[4]
    cases = [(spec(**switches), torch.float32) for spec in (PowerSGDSpec, BatchedPowerSGDSpec)]
    assert three_ranks.run(laws.differences_from_torch, cases, 4, alone) == [[], [], []]


def test_basis_with_more_columns_than_rows_raises() -> None:
    with pytest.raises(ValueError, match="3 columns of 2 elements"):
        Basis(torch.zeros(1, 2, 3))


@pytest.mark.parametrize(
    ("what", "spoiled"), [("inf matrix", [0]), ("nan matrix", [0]), ("inf vector", [1]), ("noise", [])]
)
def test_non_finite_gradient_is_reported_with_parameter_and_step(
    two_ranks: Ranks, what: str, spoiled: list[int]
) -> None:
    spec = PowerSGDSpec(start_powerSGD_iter=2, matrix_approximation_rank=2)
    for warnings, peaks in two_ranks.run(laws.collect_warnings, spec, torch.float32, 1.0, what, 4):
        assert warnings == {("non-finite", f"of.{i}", 4) for i in spoiled}
        assert [i for i, peak in enumerate(peaks) if not math.isfinite(peak)] == spoiled


@pytest.mark.parametrize("hook", [PowerSGDSpec, BatchedPowerSGDSpec])
def test_half_precision_overflow_is_reported_with_parameter_and_step(two_ranks: Ranks, hook: type[laws.Spec]) -> None:
    # How large P becomes depends on the Q that is drawn, and numbers of 16 bits are others in torch 2.9 than in 2.13: with
    # this seed all versions give what is looked for here.
    spec = hook(start_powerSGD_iter=2, use_error_feedback=False, warm_start=False, random_seed=2)
    matrices = (0, 2) if hook is PowerSGDSpec else (0, 1, 2)  # batched: what is in the bucket shares its fate
    for warnings, peaks in two_ranks.run(laws.collect_warnings, spec, torch.float16, 3000.0, "ones", 3):
        assert warnings == set() and all(2900 < peak < 3100 for peak in peaks)
    # Finite, and wrong: the norm of P is beyond float16, so that P divided by it is zero. torch's hook says nothing.
    for warnings, peaks in two_ranks.run(laws.collect_warnings, spec, torch.float16, 10_000.0, "ones", 3):
        assert warnings == {("low-rank-overflow", f"of.{i}", 3) for i in matrices}
        assert [peaks[i] for i in matrices] == [0.0 for _ in matrices]
    # An element of P is beyond it, or a sum over the ranks.
    for warnings, peaks in two_ranks.run(laws.collect_warnings, spec, torch.float16, 60_000.0, "ones", 3):
        assert {("non-finite", "of.1", 3), ("non-finite", "of.2", 3)} <= warnings
        assert not math.isfinite(peaks[1]) and not math.isfinite(peaks[2])
    # The norm of Q is beyond it, which spoils the step that begins with this Q.
    warm = hook(start_powerSGD_iter=2, use_error_feedback=False, random_seed=2)
    for warnings, _ in two_ranks.run(laws.collect_warnings, warm, torch.float16, 1200.0, "ones", 3):
        assert warnings == {("low-rank-overflow", f"of.{i}", 3) for i in matrices}
