"""Copies beside the training: exact, in time, and never of what has changed."""

from __future__ import annotations

import math
import os
import resource
import threading
from itertools import accumulate
from queue import Queue
from typing import Any

import pytest
import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_store.format.shard_slices import plan_slices
from ratchet_store.write.rank_file import Piece
from ratchet_worker.checkpoint import copy_chunks, host_copy
from ratchet_worker.checkpoint.copy_sources import Audit, Lister, Source, Sources
from ratchet_worker.checkpoint.host_copy import Staged, Staging
from ratchet_worker.ipc.save_reports import first_difference
from ratchet_worker.state import replica_digests
from ratchet_worker.state.snapshot import Snapshot, Until, byte_view, flat
from tests.support.server import wait_for

pytestmark = pytest.mark.usefixtures("no_small_tensors")

CPU = torch.device("cpu")


def staged(*sources: Source) -> Staged:
    return Staging(CPU).stage(Sources(sources))


def written(staged: Staged) -> list[tuple[Piece, bytes]]:
    pieces, data = staged.data_to_write()
    ends = [*accumulate(piece.nbytes for piece in pieces)]
    assert len(data) == (ends[-1] if ends else 0)
    return [(piece, bytes(data[end - piece.nbytes : end])) for piece, end in zip(pieces, ends, strict=True)]


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
    torch.randn(1_400_001).to(torch.bfloat16)[1:],  # large, and not where its memory begins
    torch.randn(2_500_003)[3:],  # in several copies
]


@pytest.mark.parametrize("until", list(Until))
def test_staged_copy_has_row_major_bytes_of_every_tensor_kind(until: Until) -> None:
    whole = staged(*[source(t, until) for t in TENSORS])
    whole.finish()
    order = sorted(TENSORS, key=lambda tensor: (-tensor.element_size(), -math.gcd(tensor.nbytes, 64)))
    for tensor, (piece, data) in zip(order, written(whole), strict=True):
        assert (data, piece.shape, piece.start) == (bytes(byte_view(flat(tensor))), tensor.shape, 0)
    whole_one = torch.arange(100.0)
    part = staged(source(whole_one, start=17, stop=60))
    part.finish()
    ((piece, data),) = written(part)
    assert data == bytes(byte_view(whole_one[17:60])) and piece.start == 17


def test_staged_tensors_may_change_after_wait_for_own_phase() -> None:
    """Whoever waits copies, too: nobody else has begun here."""
    now, later = torch.ones(1000), torch.ones(5000)
    whole = staged(source(now, Until.BOUNDARY), source(later, Until.STEP))
    now.fill_(2)
    whole.wait(Until.STEP)
    later.fill_(3)
    whole.finish()
    assert [torch.frombuffer(bytearray(data), dtype=torch.float32).unique().tolist() for _, data in written(whole)] == [
        [1.0],
        [1.0],
    ]


@pytest.mark.parametrize("cores", [2, 1])
def test_staging_wait_helps_copying_and_waits_for_other_thread(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """With one core the other thread stops: two would only take it from each other."""
    tensors = [torch.full((3 << 20,), float(number)) for number in range(4)]  # of 12 MB: copied in two
    sources = [source(tensor)._replace(name=f"shared/model/{i}") for i, tensor in enumerate(tensors)]
    whole = Staging(CPU, cores).stage(Sources(sources))
    real, begun, copied = host_copy._copy_bytes, Queue[str](), dict[str, int]()
    may_go = {"saves": threading.Semaphore(0), "waits": threading.Semaphore(0)}

    def move(*to_from_bytes: Any) -> None:
        name = threading.current_thread().name
        begun.put(name)
        assert may_go[name].acquire(timeout=20)
        copied[name] = copied.get(name, 0) + 1
        real(*to_from_bytes)

    monkeypatch.setattr(host_copy, "_copy_bytes", move)
    saves = threading.Thread(target=whole.finish, name="saves")
    waits = threading.Thread(target=whole.wait, args=(Until.STEP,), name="waits")
    saves.start()
    assert begun.get(timeout=20) == "saves"
    waits.start()
    assert begun.get(timeout=20) == "waits"
    may_go["saves"].release()
    if cores == 2:
        assert begun.get(timeout=20) == "saves"  # goes on with another
    may_go["waits"].release(8)
    wait_for(lambda: copied.get("waits") == (6 if cores == 2 else 7), "all that is left to be copied", 20)
    waits.join(0.2 if cores == 2 else 20)
    assert waits.is_alive() == (cores == 2)  # the other's is not copied yet
    may_go["saves"].release(8)
    saves.join(20)
    waits.join(20)
    assert not waits.is_alive() and copied == ({"saves": 2, "waits": 6} if cores == 2 else {"saves": 1, "waits": 7})
    assert [data for _, data in written(whole)] == [bytes(byte_view(tensor)) for tensor in tensors]


def test_forked_process_does_not_cause_copy_on_write_faults() -> None:
    """Memory that both have would be copied once more, page by page, where the saving rank writes to it."""
    place, weight = Staging(CPU), torch.ones(8 << 20)
    sources = Sources([source(weight)], object())
    place.stage(sources).finish()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.close(write)
        os.read(read, 1)  # until the parent ends
        os._exit(0)
    os.close(read)
    try:
        staged = place.stage(sources)
        Staging(CPU).stage(Sources([source(torch.ones(10))])).finish()  # touches all else that is shared
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        staged.finish()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        os.close(write)
        os.waitpid(child, 0)
    assert faults < 200, f"{faults} of {weight.nbytes >> 12} pages"


def test_interrupted_copy_fails_on_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop's thread, which takes part: a signal's handler may raise there."""
    whole = staged(source(torch.ones(1000)))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(host_copy, "_copy_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            whole.wait(Until.STEP)
    with pytest.raises(StateError, match="interrupted"):
        whole.finish()


def test_copy_interrupted_during_takeover_does_not_block_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one core: the other thread leaves the rest to one that makes none of it."""
    whole, real = Staging(CPU, 1).stage(Sources([source(torch.ones(1000))])), copy_chunks.Work.take_over

    def interrupted(work: copy_chunks.Work) -> None:
        real(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(copy_chunks.Work, "take_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        whole.wait(Until.STEP)
    found: list[str] = []

    def finish() -> None:
        with pytest.raises(StateError) as caught:
            whole.finish()
        found.append(str(caught.value))

    saves = threading.Thread(target=finish, daemon=True)
    saves.start()
    saves.join(10)
    assert ["interrupted" in text for text in found] == [True]


def test_copy_interrupted_after_last_byte_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other thread waits for it already."""
    whole = staged(source(weight := torch.arange(1000.0)))
    saves, waits = threading.Thread(target=whole.finish, daemon=True), threading.Event()
    work, real = whole._work[Until.STEP], vars(copy_chunks.Work)["is_done"].fget

    def is_made(some: copy_chunks.Work) -> Any:
        if some is work and threading.current_thread() is not saves:
            saves.start()
            assert waits.wait(10)
            raise KeyboardInterrupt
        if some is work and not waits.is_set():
            waits.set()
            return False
        return real(some)

    monkeypatch.setattr(copy_chunks.Work, "is_done", property(is_made))
    with pytest.raises(KeyboardInterrupt):
        whole.wait(Until.STEP)
    saves.join(10)
    assert not saves.is_alive() and [data for _, data in written(whole)] == [bytes(byte_view(weight))]


def test_tensor_changed_during_copy_fails_by_name() -> None:
    weight = nn.Parameter(torch.ones(10))
    whole = staged(source(weight.detach()))
    with torch.no_grad():
        weight.clamp_(0, 0.5)
    with pytest.raises(StateError, match=r"shared/model/w .*checkpoint\.staging"):
        whole.finish()


def test_staging_audit_detects_changes_through_data_attribute() -> None:
    """``.data`` is how weights are clipped, and averages swapped in."""
    weight, still = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
    audit = Audit([source(still.detach()), source(weight.detach())._replace(name="shared/model/clipped")])
    assert audit.first_changed() is None
    weight.data.clamp_(0, 0.5)
    assert audit.first_changed() == "shared/model/clipped"


def test_ranks_together_stage_every_element_once() -> None:
    snapshot = Snapshot(shared={f"model/{i}": torch.randn(n) for i, n in enumerate((1, 0, 77, 1000, 3))})
    snapshot.private["rng/torch"] = torch.arange(5)
    found: dict[str, list[tuple[int, int]]] = {}
    for rank in range(3):
        for one in Lister(rank).list_sources(snapshot, plan_slices(snapshot.sizes(), 3)[rank]).entries:
            found.setdefault(one.name, []).append((one.start, one.stop))
    for name, tensor in snapshot.shared.items():
        covered = sorted(i for start, stop in found[f"shared/{name}"] for i in range(start, stop))
        assert covered == list(range(tensor.numel()))
    assert all(found[f"rank/{rank}/rng/torch"] == [(0, 5)] for rank in range(3))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_replicas_differing_in_one_bit_are_found_and_named(world_size: int) -> None:
    replica = {f"model/{i}": torch.arange(float(n)) for i, n in enumerate((3, 5000, 1, 0, 700))}
    sizes = [(name, t.numel(), t.element_size()) for name, t in replica.items()]
    plan = replica_digests.plan_parts(sizes, replica_digests.number_of_parts(sizes, world_size))
    right = [replica_digests.slice_digests(slices, replica) for slices in plan]
    odd = {name: t.clone() for name, t in replica.items()}
    odd["model/4"].view(torch.int32)[699] ^= 1
    for rank in range(world_size):  # the one whose replica is another
        replicas = [odd if r == rank else replica for r in range(world_size)]
        cuts = [range(r * len(plan) // world_size, (r + 1) * len(plan) // world_size) for r in range(world_size)]
        own = [replica_digests.slice_digests(plan[p], replicas[r]) for r in range(world_size) for p in cuts[r]]
        seen = [
            {
                str(p): d
                for p, d in replica_digests.compare_parts(
                    plan, replicas[r], r, world_size, 1, replica_digests.total_bytes(sizes), lambda: False
                ).items()
            }
            for r in range(world_size)
        ]
        found = first_difference(own, seen)
        assert found is not None and plan[found.part][found.slice].name == "model/4"
        writer = found.part * world_size // len(plan)
        assert found.ranks == ([r for r in range(world_size) if r != rank] if writer == rank else [rank])
        assert first_difference(right, []) is None


def test_replica_comparison_without_time_covers_all_parts_in_turn() -> None:
    replica = {"model/w": torch.zeros(64 << 20, dtype=torch.uint8)}
    sizes = [("model/w", 64 << 20, 1)]
    parts = replica_digests.number_of_parts(sizes, 2)
    plan, looked = replica_digests.plan_parts(sizes, parts), set[int]()
    for number in range(1, parts):
        looked |= replica_digests.compare_parts(plan, replica, 0, 2, number, 64 << 20, lambda: True).keys()
        if looked == set(range(parts // 2, parts)):
            assert number >= 4  # never so much at a time that it would be felt
            return
    raise AssertionError(f"rank 0 has looked at {sorted(looked)} alone")
