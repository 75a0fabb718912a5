"""A run resumed at any step ends in the same bits as one that nobody interrupted: hooks, buckets, DDP options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ratchet_hooks.specs import PowerSGDSpec
from tests.support.groups import Ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case, buckets, exact_resumes

# Compression starts at step 3; DDP rebuilds its buckets between steps 1 and 2, static graph's would between 2 and 3.
KILLS = [0, 1, 2, 3, 4]
TOTAL = 6

GUARDED = PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3, orthogonalization_epsilon=1e-8)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("hook", ["allreduce", "fp16_compress", "powerSGD"])
@pytest.mark.parametrize("cap", [ONE_BUCKET, MANY_BUCKETS], ids=["one-bucket", "many-buckets"])
def test_every_hook_with_one_and_many_buckets(three: Ranks, hook: str, cap: float) -> None:
    case = Case(hook=hook, cap=cap)
    count = three.run(buckets, case)[0]
    assert count == 1 if cap == ONE_BUCKET else count >= 3
    assert three.run(exact_resumes, case, TOTAL, KILLS) == [{}, {}, {}]


CONFIGURATIONS = {
    "static_graph": Case(ddp={"static_graph": True}),
    "gradient_as_bucket_view": Case(ddp={"gradient_as_bucket_view": True}),
    "both": Case(ddp={"static_graph": True, "gradient_as_bucket_view": True}, keep_grads=True),
    "kept_views": Case(ddp={"gradient_as_bucket_view": True}, keep_grads=True),
    "unused": Case(ddp={"find_unused_parameters": True}, unused=True),
    "static_unused": Case(ddp={"static_graph": True}, unused=True),
    "accumulation": Case(accumulate=2),
    "accumulation_views": Case(accumulate=2, ddp={"gradient_as_bucket_view": True}),
    "order_changes": Case(turn=3),
    "order_changes_unused": Case(turn=3, ddp={"find_unused_parameters": True}),
    "mixed_tied_frozen": Case(mixed=True),
    "no_buffer_broadcast": Case(ddp={"broadcast_buffers": False}),
}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_every_ddp_configuration_under_allreduce(three: Ranks, name: str) -> None:
    case = replace(CONFIGURATIONS[name], cap=MANY_BUCKETS)
    assert three.run(exact_resumes, case, 4, [1, 2]) == [{}, {}, {}]


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_every_ddp_configuration_under_powersgd(two: Ranks, name: str) -> None:
    case = replace(CONFIGURATIONS[name], hook="powerSGD", cap=MANY_BUCKETS, spec=GUARDED)
    assert two.run(exact_resumes, case, TOTAL, [1, 4]) == [{}, {}]


POWERSGD = {
    "cold_start": PowerSGDSpec(matrix_approximation_rank=1, start_powerSGD_iter=2, warm_start=False),
    "no_feedback": PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=False),
    "neither": PowerSGDSpec(start_powerSGD_iter=0, use_error_feedback=False, warm_start=False, random_seed=7),
    "batched": PowerSGDSpec(matrix_approximation_rank=4, start_powerSGD_iter=2, batch_tensors_with_same_shape=True),
    "compress_all": PowerSGDSpec(start_powerSGD_iter=2, min_compression_rate=0.1, orthogonalization_epsilon=1e-6),
}


@pytest.mark.parametrize("name", list(POWERSGD))
def test_every_parameter_of_powersgd(two: Ranks, name: str) -> None:
    case = Case(hook="powerSGD", cap=MANY_BUCKETS, spec=POWERSGD[name])
    assert two.run(exact_resumes, case, TOTAL, [1, 4]) == [{}, {}]


def test_one_rank_alone() -> None:
    with Ranks(1) as one:
        assert one.run(exact_resumes, Case(hook="powerSGD", cap=MANY_BUCKETS), TOTAL, [1, 4]) == [{}]
