"""A rank's fingerprint: every element within one round of the plan, every generator, any kind of tensor, on either path."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ratchet_contract.checkpoint.step_ring import StepFingerprint
from ratchet_worker.state import rng
from ratchet_worker.state.step_fingerprint import StepFingerprints

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    with rng.fork_rng(CPU):
        yield


def take(fingerprints: StepFingerprints, step: int) -> StepFingerprint:
    (found,) = [*fingerprints.record_step(step, (0, step)), *fingerprints.drain()]
    return found


def every(parameters: list[torch.Tensor], *, on_device: bool) -> list[int]:
    fingerprints = StepFingerprints(parameters, CPU, on_device=on_device)
    return [take(fingerprints, step).parameters for step in range(len(fingerprints.plan.chunks))]


def bits(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator, dtype=torch.uint8).bool()
    if dtype.itemsize == 1:
        return torch.randint(100, shape, generator=generator, dtype=torch.uint8).view(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(
        dtype
    )


KINDS: dict[str, Any] = {
    "small": lambda: [bits(n, 7, 3) for n in range(100)],
    "large": lambda: [bits(0, 700, 300), bits(1, 5)],
    "a scalar and an empty one": lambda: [bits(0), torch.empty(0), bits(1, 3)],
    "bool, bytes and float8 of odd sizes": lambda: [
        bits(0, 7, dtype=torch.bool), bits(1, 5, dtype=torch.uint8), bits(2, 9, dtype=torch.float8_e4m3fn),
    ],
    "halves and doubles": lambda: [bits(0, 7, dtype=torch.bfloat16), bits(1, 3, dtype=torch.float64)],
    "complex": lambda: [bits(0, 33, 5, dtype=torch.complex64)],
    "channels last": lambda: [bits(0, 8, 4, 3, 3).to(memory_format=torch.channels_last)],
    "with gaps": lambda: [bits(0, 40, 20)[:, :11], bits(1, 6).expand(4, 6)],
    "transposed and frozen": lambda: [bits(0, 40, 20).t(), nn.Parameter(bits(1, 6), requires_grad=False)],
}  # fmt: skip


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_detects_any_element_change_within_one_round(kind: str, on_device: bool) -> None:
    """One flipped bit at a time: the lowest of the first and of the last element, and one in the middle."""
    parameters = KINDS[kind]()
    before = every(parameters, on_device=on_device)
    assert every(KINDS[kind](), on_device=on_device) == before
    for number, parameter in enumerate(parameters):
        if kind == "with gaps" and number == 1:
            continue  # its elements share memory
        for place in {0, parameter.numel() // 2, parameter.numel() - 1} if parameter.numel() else ():
            other = KINDS[kind]()
            element = (
                other[number].detach()[np.unravel_index(place, parameter.shape)] if parameter.ndim else other[number]
            )
            raw = element.reshape(1).view(torch.uint8)
            changed = torch.cat([raw[:1] ^ 1, raw[1:]]).view(element.dtype)
            with torch.no_grad():
                element.copy_(changed[0])
            assert every(other, on_device=on_device) != before, (number, place)


@pytest.mark.parametrize("on_device", [False, True])
def test_fingerprint_detects_two_flipped_signs(on_device: bool) -> None:
    weight = bits(0, 64, 64)
    other = weight.clone()
    other[3, 5].neg_()
    other[60, 7].neg_()
    assert every([weight], on_device=on_device) != every([other], on_device=on_device)


def test_few_bytes_and_few_tensors_are_read_per_step() -> None:
    plan = StepFingerprints([bits(0, 50)] * 500 + [torch.zeros(40 << 20, dtype=torch.uint8)], CPU).plan
    assert max(sum(p.stop - p.start for p in chunk) for chunk in plan.chunks) <= plan.chunk_bytes < 100 << 10
    assert max(map(len, plan.chunks)) <= 4
    assert sum(p.stop - p.start for chunk in plan.chunks for p in chunk) == 500 * 200 + (40 << 20)


def test_fingerprint_plan_depends_only_on_shapes() -> None:
    one, other = (StepFingerprints([bits(n, 40, 30), bits(n, 5)], CPU).plan for n in (1, 2))
    assert one.digest == other.digest
    assert StepFingerprints([bits(1, 30, 40), bits(1, 5)], CPU).plan.digest != one.digest


DRAWS: dict[str, Any] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),
    "random": lambda: random.random(),
    "half of a pair": lambda: random.gauss(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_fingerprint_of_generators_alone_changes_after_draw(name: str) -> None:
    rng.seed_all(7, 0)
    fingerprints = StepFingerprints([bits(0, 5)], CPU)
    before = take(fingerprints, 1)
    DRAWS[name]()
    after = take(fingerprints, 1)
    assert before.first_difference(after) == "generators" and after.parameters == before.parameters
    rng.seed_all(7, 0)
    assert take(fingerprints, 1) == before


def test_fingerprint_of_freed_storage_does_not_crash() -> None:
    """What it tells then is that the memory is not there; when it is back, what it told before."""
    weight = bits(0, 100)
    for on_device in (False, True):
        fingerprints = StepFingerprints([weight], CPU, on_device=on_device)
        before = take(fingerprints, 1)
        copy, size = weight.clone(), weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        assert take(fingerprints, 1).parameters != before.parameters
        weight.untyped_storage().resize_(size)
        weight.copy_(copy)
        assert take(fingerprints, 1) == before


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["large", "with gaps", "complex"])
def test_fingerprint_of_storage_that_is_too_small_is_that_of_a_freed_one(kind: str, on_device: bool) -> None:
    """Also where it was freed first: it may then have the address that it had before."""
    (weight, *_) = KINDS[kind]()
    fingerprints = StepFingerprints([weight], CPU, on_device=on_device)
    last = len(fingerprints.plan.chunks) - 1
    storage, copy, before = weight.untyped_storage(), weight.clone(), take(fingerprints, last)
    size, found = storage.nbytes(), []
    for sizes in ([0, size // 2], [0], [4]):
        for one in sizes:
            storage.resize_(one)
        found.append(take(fingerprints, last))
    assert found == [found[1]] * 3 and found[1].parameters != before.parameters
    storage.resize_(size)
    weight.copy_(copy)
    assert take(fingerprints, last) == before


def test_fingerprint_leaves_out_sparse_tensors() -> None:
    sparse = torch.eye(3).to_sparse()
    fingerprints = StepFingerprints([bits(0, 5), sparse], CPU)
    assert fingerprints.plan.unreadable == [1]
    assert take(fingerprints, 1).parameters


def test_fingerprint_covers_replaced_numpy_bit_generator() -> None:
    fingerprints, own = StepFingerprints([bits(0, 5)], CPU), np.random.mtrand._rand._bit_generator
    try:
        for other in (np.random.PCG64(1), np.random.MT19937(1)):
            np.random.set_bit_generator(other)
            before = take(fingerprints, 1)
            assert take(fingerprints, 1) == before
            np.random.rand()
            assert take(fingerprints, 1).first_difference(before) == "generators"
    finally:
        np.random.set_bit_generator(own)


def test_fingerprint_follows_moved_tensor_memory() -> None:
    weight = bits(0, 100)
    fingerprints = StepFingerprints([weight], CPU)
    before = take(fingerprints, 1)
    weight.data = weight.data.clone()
    assert take(fingerprints, 1) == before
    weight.data[7] += 1
    assert take(fingerprints, 1) != before
