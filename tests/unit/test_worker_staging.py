"""Copies beside the training: exact, in time, and never of what has changed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ratchet_store.slices import plan_slices
from ratchet_worker import fingerprint
from ratchet_worker.audit import Audit
from ratchet_worker.snapshot import Snapshot, Until, byte_view, flat
from ratchet_worker.sources import Lister, Source, Sources
from ratchet_worker.staging import Staged, Staging

CPU = torch.device("cpu")


def staged(*sources: Source) -> Staged:
    return Staging(CPU).stage(Sources(sources))


def source(tensor: torch.Tensor, until: Until = Until.STEP, start: int = 0, stop: int | None = None) -> Source:
    return Source("shared/model/w", tensor, start, tensor.numel() if stop is None else stop, until)


TENSORS = [
    torch.randn(300, 7),
    torch.randn(64, 33).t(),  # not row-major
    torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    torch.randn(5).to(torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.tensor(2.5, dtype=torch.float64),
    torch.arange(1000)[3:],  # not at the start of its memory
    torch.empty(0, 4),
    torch.randn(40).to(torch.float8_e4m3fn),
    torch.randn(7, dtype=torch.complex64).conj(),  # put off: its memory has the other sign
    torch.randn(7, dtype=torch.complex64).conj().imag,
]


@pytest.mark.parametrize("until", list(Until))
def test_a_copy_has_the_bytes_of_every_kind_of_tensor_in_row_major_order(until: Until) -> None:
    whole = staged(*[source(t, until) for t in TENSORS])
    for kind in Until:
        whole.copy(kind)
    for tensor, piece in zip(TENSORS, whole.pieces(), strict=True):
        assert (bytes(piece.data), piece.shape, piece.start) == (bytes(byte_view(flat(tensor))), tensor.shape, 0)
    whole_one = torch.arange(100.0)
    part = staged(source(whole_one, start=17, stop=60))
    part.copy(Until.STEP)
    assert bytes(part.pieces()[0].data) == bytes(byte_view(whole_one[17:60])) and part.pieces()[0].start == 17
    assert whole.error is None and part.error is None


def test_what_is_staged_at_the_boundary_may_change_at_once_and_the_rest_when_it_was_waited_for() -> None:
    now, later = torch.ones(1000), torch.ones(5000)
    whole = staged(source(now, Until.BOUNDARY), source(later, Until.STEP))
    now.fill_(2)
    waited = threading.Event()

    def wait() -> None:
        whole.wait(Until.STEP)
        later.fill_(3)
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not waited.wait(0.05)  # nobody has copied it yet
    whole.copy(Until.STEP)
    thread.join(10)
    assert waited.is_set() and whole.error is None
    assert [torch.frombuffer(p.data, dtype=torch.float32).unique().tolist() for p in whole.pieces()] == [[1.0], [1.0]]


def test_a_tensor_that_changes_too_early_fails_the_copy_by_name() -> None:
    weight = nn.Parameter(torch.ones(10))
    whole = staged(source(weight.detach()))
    with torch.no_grad():
        weight.clamp_(0, 0.5)
    whole.copy(Until.STEP)
    assert whole.error is not None and "shared/model/w" in whole.error and "checkpoint.staging" in whole.error


def test_the_trial_sees_what_torch_does_not_count() -> None:
    """``.data`` is how weights are clipped, and averages swapped in."""
    weight, still = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
    audit = Audit([source(still.detach()), source(weight.detach())._replace(name="shared/model/clipped")])
    assert audit.changed() is None
    weight.data.clamp_(0, 0.5)
    assert audit.changed() == "shared/model/clipped"


def test_ranks_together_stage_every_element_once() -> None:
    snapshot = Snapshot(shared={f"model/{i}": torch.randn(n) for i, n in enumerate((1, 0, 77, 1000, 3))})
    snapshot.private["rng/torch"] = torch.arange(5)
    found: dict[str, list[tuple[int, int]]] = {}
    for rank in range(3):
        for one in Lister(rank).of(snapshot, plan_slices(snapshot.sizes(), 3)[rank]).each:
            found.setdefault(one.name, []).append((one.start, one.stop))
    for name, tensor in snapshot.shared.items():
        covered = sorted(i for start, stop in found[f"shared/{name}"] for i in range(start, stop))
        assert covered == list(range(tensor.numel()))
    assert all(found[f"rank/{rank}/rng/torch"] == [(0, 5)] for rank in range(3))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_replicas_that_differ_in_one_bit_are_found_and_named(world_size: int) -> None:
    replica = {f"model/{i}": torch.arange(float(n)) for i, n in enumerate((3, 5000, 1, 0, 700))}
    sizes = [(name, t.numel(), t.element_size()) for name, t in replica.items()]
    plan = fingerprint.cut(sizes, fingerprint.number_of_parts(sizes, world_size))
    right = [fingerprint.slice_digests(slices, replica) for slices in plan]
    odd = {name: t.clone() for name, t in replica.items()}
    odd["model/4"].view(torch.int32)[699] ^= 1
    for rank in range(world_size):  # the one whose replica is another
        replicas = [odd if r == rank else replica for r in range(world_size)]
        cuts = [range(r * len(plan) // world_size, (r + 1) * len(plan) // world_size) for r in range(world_size)]
        own = [fingerprint.slice_digests(plan[p], replicas[r]) for r in range(world_size) for p in cuts[r]]
        seen = [
            {
                str(p): d
                for p, d in fingerprint.compared(
                    plan, replicas[r], r, world_size, 1, fingerprint.nbytes_of(sizes), lambda: False
                ).items()
            }
            for r in range(world_size)
        ]
        found = fingerprint.first_difference(own, seen)
        assert found is not None and plan[found.part][found.slice].name == "model/4"
        writer = found.part * world_size // len(plan)
        assert found.ranks == ([r for r in range(world_size) if r != rank] if writer == rank else [rank])
        assert fingerprint.first_difference(right, []) is None


def test_with_no_time_at_all_every_part_has_its_turn() -> None:
    replica = {"model/w": torch.zeros(64 << 20, dtype=torch.uint8)}
    sizes = [("model/w", 64 << 20, 1)]
    parts = fingerprint.number_of_parts(sizes, 2)
    plan, looked = fingerprint.cut(sizes, parts), set[int]()
    for number in range(1, parts):
        looked |= fingerprint.compared(plan, replica, 0, 2, number, 64 << 20, lambda: True).keys()
        if looked == set(range(parts // 2, parts)):
            assert number >= 4  # never so much at a time that it would be felt
            return
    raise AssertionError(f"rank 0 has looked at {sorted(looked)} alone")
