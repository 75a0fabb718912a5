"""Slots: nobody shares, nobody starves, and a job that waits knows why."""

from __future__ import annotations

import random

import pytest

from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.scheduling.machine import visible_gpus
from ratchet_service.scheduling.slots import Board, Capacity, Grant, Need, Waiting, is_oversubscribed, need_of


def test_granted_slots_are_never_shared_between_jobs() -> None:
    random.seed(0)
    for _ in range(300):
        capacity = Capacity(tuple(range(random.randint(0, 4))), random.randint(1, 8))
        held: list[Grant] = []
        for _ in range(12):
            board = Board(capacity, held)
            need = Need(random.randint(0, len(capacity.gpus)), random.randint(1, 10))
            answer = board.allocate("job", need)
            if isinstance(answer, Grant):
                assert len(answer.gpus) == need.gpus
                assert len(answer.cpus) == min(need.cpus, capacity.cpus)
                held.append(answer)
            elif held:
                held.pop(random.randrange(len(held)))
            for kind in ("gpus", "cpus"):
                taken = [i for grant in held for i in getattr(grant, kind)]
                assert len(taken) == len(set(taken))
                assert set(taken) <= set(capacity.gpus if kind == "gpus" else range(capacity.cpus))


def test_oversubscribed_job_runs_alone() -> None:
    capacity = Capacity((), 4)
    assert is_oversubscribed(Need(0, 9), capacity)
    board = Board(capacity, [])
    assert board.allocate("big", Need(0, 9)) == Grant((), (0, 1, 2, 3))
    assert isinstance(board.allocate("small", Need(0, 1)), Waiting)
    busy = Board(capacity, [Grant((), (2,))])
    assert isinstance(busy.allocate("big", Need(0, 9)), Waiting)


def test_small_jobs_do_not_overtake_large_job_on_scarce_slots() -> None:
    board = Board(Capacity((0, 1), 8), [Grant((0,), (0,), "first")])
    waiting = board.allocate("large", Need(2, 2))
    assert waiting == Waiting("waits for 2 of 2 GPUs (1 free; first has GPU 0)")
    assert board.allocate("small", Need(1, 1)) == Waiting(
        "waits for 1 of 2 GPUs (0 free; first has GPU 0), behind job large"
    )
    assert isinstance(board.allocate("cpu only", Need(0, 3)), Grant)


def test_job_that_can_never_fit_does_not_block_others() -> None:
    board = Board(Capacity((0,), 4), [])
    answer = board.allocate("impossible", Need(2, 4))
    assert isinstance(answer, Waiting) and "needs 2 GPUs, this machine has 1" in answer.message
    assert board.allocate("other", Need(1, 4)) == Grant((0,), (0, 1, 2, 3))


def test_needs_follow_from_device_and_threads() -> None:
    spec = JobSpec.model_validate({"name": "a", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 3}})
    cpu = Resolved(device="cpu", backend="gloo", threads_per_rank=2, python="/p")
    assert need_of(spec, cpu) == Need(0, 6)
    assert need_of(spec, cpu.model_copy(update={"device": "cuda"})) == Need(3, 6)


def test_wait_message_names_jobs_holding_slots() -> None:
    board = Board(Capacity((0, 1, 2), 4), [Grant((2,), (0,), "old")])
    assert board.allocate("new", Need(2, 2)) == Grant((0, 1), (1, 2))
    assert board.allocate("late", Need(1, 2)) == Waiting(
        "waits for 1 of 3 GPUs (0 free; new has GPU 0, 1, old has GPU 2) and 2 of 4 CPU slots (1 free; old has 1, new has 2)"
    )
    nodes = Board(Capacity((0, 1, 2), 3), [Grant((2,), (1, 2), "wide"), Grant((0, 1), (0,), "wide")])
    assert nodes.allocate("late", Need(1, 1)) == Waiting(
        "waits for 1 of 3 GPUs (0 free; wide has GPU 0, 1, 2) and 1 of 3 CPU slots (0 free; wide has 3)"
    )
    many = Board(Capacity((), 9), [Grant((), (i,), f"j{i}") for i in range(9)])
    assert many.allocate("late", Need(0, 1)) == Waiting(
        "waits for 1 of 9 CPU slots (0 free; j0 has 1, j1 has 1, j2 has 1, j3 has 1, 5 jobs more)"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2,0", (2, 0)),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", (1,)),  # up to the first that is not there
        ("0,7,1", (0,)),
        ("GPU-bb,0", (1, 0)),
        ("NoDevFiles", ()),
        ("1,1", "twice"),
        ("GPU-", "lists 3 such GPUs"),
        ("GPU-zz", "lists 0 such GPUs"),
        ("MIG-aa", "a part of a GPU"),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(text: str, expected: tuple[int, ...] | str) -> None:
    uuids = {"GPU-aa1": 0, "GPU-bb1": 1, "GPU-cc1": 2}
    if isinstance(expected, tuple):
        assert visible_gpus(text, (0, 1, 2), lambda: uuids) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            visible_gpus(text, (0, 1, 2), lambda: uuids)
