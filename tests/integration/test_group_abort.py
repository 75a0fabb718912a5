"""Survivors of a dead rank abort their communicators before the agent kills them, and one that cannot is killed all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause
from tests.support.launch import Attempt, Job
from tests.support.server import processes_below, rank_pid, wait_for

TASK = '''
import ctypes, sys, time
import torch
import torch.distributed as dist
from torch import nn
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Stuck:
    """In its third step rank 0 waits in a collective for rank 2, which is busy elsewhere; rank 1 waits to be killed."""

    def __init__(self, busy):
        self.busy, self.steps = busy, 0

    def build(self, context):
        self.rank = context.rank
        net = nn.Linear(4, 1)
        data = TrainLoader(torch.randn(64, 4), batch_size=6, seed=3, rank=context.rank, world_size=context.world_size)
        return Parts(model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), train=data, total_steps=10)

    def loss(self, model, batch):
        self.steps += 1
        if self.steps == 3:
            print("busy", flush=True)
            if self.rank == 0:
                dist.recv(torch.zeros(1), src=2)
            elif self.rank == 2 and self.busy == "native code with Python's lock":
                ctypes.PyDLL(None).sleep(1000)
            time.sleep(1000)
        return model(batch).square().mean()
'''


def _log(attempt: Attempt, rank: int) -> str:
    log = attempt.paths.log(rank)
    return log.read_text() if log.exists() else ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    attempts: list[Attempt] = []

    def begin(busy: str) -> Attempt:
        code = tmp_path / "code"
        code.mkdir()
        (code / "stuck.py").write_text(TASK)
        spec = {
            "task": {"entrypoint": "stuck:Stuck", "args": {"busy": busy}},
            "world": {"ranks_per_node": 3, "device": "cpu"},
        }
        attempts.append(Job(tmp_path / "job", spec, code).launch())
        wait_for(
            lambda: all("busy" in _log(attempts[0], rank) for rank in range(3)),
            "all ranks to be busy in their third step",
            60,
        )
        return attempts[0]

    yield begin
    for attempt in attempts:
        attempt.close()


@pytest.mark.parametrize("busy", ["Python", "native code with Python's lock", "halted"])
def test_survivors_abort_their_communicators_before_they_are_killed(start: object, busy: str) -> None:
    attempt: Attempt = start(busy)  # type: ignore[operator]
    ranks = processes_below(attempt.agent.pid)
    if busy == "halted":
        os.kill(rank_pid(attempt.paths, 2), signal.SIGSTOP)
    os.kill(rank_pid(attempt.paths, 1), signal.SIGKILL)
    result = attempt.wait(30)
    assert (result.cause, result.rank) == (Cause.RANK_KILLED, 1), attempt.logs()
    logs = [_log(attempt, rank) for rank in range(3)]
    assert ["it aborted its process groups" in log for log in logs] == [True, False, busy == "Python"], logs
    assert not any("Traceback" in log for log in logs), logs
    silent = "rank 2 did not abort its process groups" in attempt.paths.agent_log.read_text()
    assert silent == (busy == "native code with Python's lock")
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
