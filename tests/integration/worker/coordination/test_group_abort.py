"""Survivors of a dead rank abort their communicators before the agent kills them, and one that cannot is killed all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause
from tests.support.launch import Attempt, Job
from tests.support.server import processes_below, rank_pid, wait_for

TASK = '''
import ctypes, time
import torch
import torch.distributed as dist
from torch import nn
from ratchet_hooks import torch_compat
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Stuck:
    """In its third step rank 0 waits in a collective for rank 2, which is busy elsewhere; rank 1 waits to be killed."""

    def __init__(self, busy):
        self.busy, self.steps = busy, 0

    def build(self, context):
        self.rank = context.rank
        self.pair = dist.new_group([0, 2])
        net = nn.Linear(4, 1)
        data = TrainLoader(torch.randn(64, 4), batch_size=6, seed=3, rank=context.rank, world_size=context.world_size)
        return Parts(model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), train=data, total_steps=10)

    def loss(self, model, batch):
        self.steps += 1
        if self.steps == 3:
            print("busy", flush=True)
            if self.rank == 0 and self.busy == "released":
                self.wait_like_nccl()
                model = model.module  # no further collective
            elif self.rank == 0:
                dist.recv(torch.zeros(1), src=2, group=self.pair)
            elif self.rank == 2 and self.busy == "native code with Python's lock":
                ctypes.PyDLL(None).sleep(1000)
            else:
                time.sleep(1000)
        return model(batch).square().mean()

    def wait_like_nccl(self):
        """As NCCL's, and unlike gloo's, this collective returns without an error once it is aborted; the abort takes a moment."""
        import threading
        released, real = threading.Event(), torch_compat.abort_groups

        def abort():
            count = real()
            released.set()
            time.sleep(0.5)
            return count

        torch_compat.abort_groups = abort
        released.wait()
        print("released", flush=True)
'''


def _log(attempt: Attempt, rank: int) -> str:
    log = attempt.paths.log(rank)
    return log.read_text() if log.exists() else ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Attempt]]:
    attempts: list[Attempt] = []

    def begin(busy: str) -> Attempt:
        code = tmp_path / "code"
        code.mkdir()
        (code / "stuck.py").write_text(TASK)
        spec = {
            "task": {"entrypoint": "stuck:Stuck", "args": {"busy": busy}},
            "world": {"ranks_per_node": 3, "device": "cpu"},
            "policy": {"step_deadline": 10 if busy == "hang" else 300},
        }
        attempt = Job(tmp_path / "job", spec, code).launch()
        attempts.append(attempt)
        logs = lambda: all("busy" in _log(attempt, rank) for rank in range(3))  # noqa: E731
        wait_for(logs, "all ranks to be busy in their third step", 60)
        return attempt

    yield begin
    for attempt in attempts:
        attempt.close()


@pytest.mark.parametrize("busy", ["Python", "native code with Python's lock", "halted"])
def test_survivors_of_a_dead_rank_abort_process_groups_before_being_killed(
    start: Callable[[str], Attempt], busy: str
) -> None:
    attempt = start(busy)
    ranks = processes_below(attempt.agent.pid)
    if busy == "halted":
        os.kill(rank_pid(attempt.paths, 2), signal.SIGSTOP)
    os.kill(rank_pid(attempt.paths, 1), signal.SIGKILL)
    result = attempt.wait(30)
    assert (result.cause, result.rank) == (Cause.RANK_KILLED, 1), attempt.logs()
    assert [end.exit_code for end in result.ranks] == [None, -signal.SIGKILL, None]
    logs = [_log(attempt, rank) for rank in range(3)]
    said = ["ratchet: aborted 2 process groups before the end" in log for log in logs]
    assert said == [True, False, busy == "Python"], logs
    assert "rank 1 ended with -9; rank 0 aborts its process groups before the agent kills it" in logs[0]
    assert not any("Traceback" in log for log in logs), logs
    words = {
        "Python": "aborted by ranks 0, 2",
        "native code with Python's lock": "aborted by rank 0, not aborted by rank 2 within 2 s",
        "halted": "aborted by rank 0",
    }
    assert result.message is not None and result.message.endswith(
        f"; process groups {words[busy]} before the agent ended them"
    )
    assert f"process groups {words[busy]}\n" in attempt.paths.agent_log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_hang_by_stopped_rank_makes_other_ranks_abort_process_groups(
    start: Callable[[str], Attempt],
) -> None:
    attempt = start("hang")
    os.kill(rank_pid(attempt.paths, 2), signal.SIGSTOP)
    result = attempt.wait(60)
    assert result.cause is Cause.HANG, attempt.logs()
    assert ["aborted 2 process groups before the end" in _log(attempt, rank) for rank in range(2)] == [True, False]
    assert (
        result.message is not None
        and "process groups aborted by ranks 0, 1 before the agent ended them" in result.message
    )


def test_results_after_an_aborted_collective_are_not_published(start: Callable[[str], Attempt]) -> None:
    """Neither a metric nor the end of the step, though the collective gave no error and the rank had time to go on."""
    attempt = start("released")
    os.kill(rank_pid(attempt.paths, 1), signal.SIGKILL)
    result = attempt.wait(30)
    assert result.cause is Cause.RANK_KILLED and "released" in _log(attempt, 0), attempt.logs()
    assert result.ranks[0].result is None and result.last_step == 2
    assert sorted(attempt.metrics()) == [1, 2]
