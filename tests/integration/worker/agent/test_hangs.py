"""Hangs: whoever stands still, and however, the stacks of all ranks are in their logs before they are killed. The job goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import Control
from ratchet_worker.ipc.progress_counter import CounterReader
from tests.support.attempts import Attempt
from tests.support.forked_attempts import AttemptForkServer, ForkedJob
from tests.support.launch import Job
from tests.support.server import wait_for

DEADLINE = {"policy": {"step_deadline": 1.0}}


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[list[Attempt]]:
    made: list[Attempt] = []
    yield made
    for attempt in made:
        attempt.close()


def log_of(attempt: Attempt, rank: int) -> str:
    return attempt.paths.log(rank).read_text()


def test_hang_writes_stacks_of_every_rank_that_can_be_reached(attempts: list[Attempt], tmp_path: Path) -> None:
    """Rank 0 waits; 1 is halted by SIGSTOP; 2 and 3 keep Python's lock in native code; 4 cannot be reached by the request."""
    does = ["spin", "stop", "hold-lock", "backtrack", "mute"]
    attempt = Attempt(tmp_path, [{"at": 4, "do": do} for do in does], spec=DEADLINE)
    attempts.append(attempt)
    attempt.service.start()
    attempt.start(stacks=1.5)
    result = attempt.wait()
    assert (result.cause, result.rank) == (Cause.HANG, 1), attempt.log()
    for rank in range(4):
        told = log_of(attempt, rank)
        heading, _, stacks = told.partition(f"ratchet: hang; rank {rank} writes the stacks of its threads:\n")
        assert stacks and "most recent call first" in stacks and "in misbehave" in stacks, (rank, told)
        assert "wrote no stacks" not in told and "most recent call first" not in heading
    assert "ratchet: rank 4 wrote no stacks: State: S (sleeping)" in log_of(attempt, 4)
    message = result.message or ""
    assert "rank 1 (stopped by a signal (SIGSTOP), training, in step 4, silent for 1 s)" in message
    assert "ratchet logs job-1 --attempt 1" in message and "rank 4 wrote none (State: S (sleeping)" in message
    assert attempt.rank_pids() == [] and result.pace is not None and result.pace.hung


def test_hang_message_names_the_longest_stalled_rank_first(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = Attempt(
        tmp_path, [{"at": 60, "do": "spin"}, {"at": 2, "do": "hold-lock"}, {"at": 9, "do": "spin"}], spec=DEADLINE
    )
    attempts.append(attempt)
    attempt.start()
    result = attempt.wait()
    assert (result.cause, result.rank) == (Cause.HANG, 1)
    assert (result.message or "").startswith("rank 1 (training, in step 2, silent for 1 s)"), result.message


def test_script_keeps_an_own_sigusr1_handler(attempts: list[Attempt], tmp_path: Path) -> None:
    """Lightning asks for a requeue by it, for one: the request for stacks is another signal."""
    attempt = Attempt(tmp_path, [{"at": 4, "do": "own-sigusr1"}], spec=DEADLINE)
    attempts.append(attempt)
    attempt.start()
    attempt.wait_step(0)
    wait_for(lambda: "ready for SIGUSR1" in log_of(attempt, 0), "the script's handler", 10, 0.02)
    os.kill(attempt.pid_of(0), signal.SIGUSR1)
    assert attempt.wait().cause is Cause.HANG
    told = log_of(attempt, 0)
    assert told.count("the script's own") == 1 and "in misbehave" in told


def test_sigusr1_makes_a_rank_write_its_stacks_and_continue(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, [{}])
    attempts.append(attempt)
    attempt.start()
    attempt.wait_step(0)
    os.kill(attempt.pid_of(0), signal.SIGUSR1)
    wait_for(lambda: "most recent call first" in log_of(attempt, 0), "the rank's stacks", 10, 0.02)
    reading = CounterReader(attempt.paths.counter(0)).read()
    assert reading is not None
    attempt.wait_step(0, reading.finished + 2)


def test_hang_on_another_node_writes_stacks_of_local_ranks(attempts: list[Attempt], tmp_path: Path) -> None:
    """Rank 0 waits for a rank of the other node, and its own deadline is far."""
    attempt = Attempt(tmp_path, [{"at": 4, "do": "spin"}], spec={"policy": {"step_deadline": 60}})
    attempts.append(attempt)
    attempt.service.start()
    attempt.start()
    attempt.wait_step(0)
    attempt.service.control = Control(peer_end="node 1 has ended with hang: rank 1 stood still", peer_cause=Cause.HANG)
    result = attempt.wait()
    assert result.secondary and not (result.pace is not None and result.pace.hung)
    told = log_of(attempt, 0)
    assert "a rank of another node hangs; rank 0 writes the stacks" in told and "in misbehave" in told


SCRIPT = """
import ctypes
import os
from pathlib import Path

import torch
from ratchet_worker.session import Session

def hold_the_lock():
    Path("held").touch()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time is for ever, and no signal ends it
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

with Session() as s:
    net = torch.nn.Linear(2, 1)
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    s.register(optimizer=optimizer)
    for step in s.steps(8):
        loss = model(torch.ones(1, 2)).sum()
        if step == 5 and os.environ["RANK"] == "1" and not Path("held").exists():
            hold_the_lock()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def script_job(warm: AttemptForkServer, at: Path, script: str, **spec: Any) -> ForkedJob:
    code = at / "code"
    code.mkdir()
    (code / "train.py").write_text(script)
    return ForkedJob(warm, at / "home", {"script": ["train.py"], "code": {"path": str(code)}, **spec}, code)


@pytest.fixture(scope="module")
def warm() -> Iterator[AttemptForkServer]:
    with AttemptForkServer() as made:
        yield made


def test_hang_in_collective_and_gil_writes_stacks_and_next_attempt_resumes(
    warm: AttemptForkServer, tmp_path: Path, jobs: list[Job]
) -> None:
    job = script_job(warm, tmp_path, SCRIPT, checkpoint={"every_steps": 2}, policy={"step_deadline": 2})
    jobs.append(job)
    hung = job.launch()
    result = hung.wait()
    assert result.cause is Cause.HANG, hung.logs()
    waits, holds = (hung.paths.log(rank).read_text() for rank in (0, 1))
    assert "in backward" in waits and "in _engine_run_backward" in waits, waits
    assert "in hold_the_lock" in holds, holds
    again = job.launch()
    assert again.wait().cause is Cause.COMPLETED, again.logs()
    base = again.base()
    assert base is not None and base.step in (2, 4)  # the save of step 4 may have wanted the lock


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(42)", 42), ("sys.exit(78)", 1), ("os._exit(43)", 43)])
def test_exit_code_of_a_script_is_in_the_result(
    warm: AttemptForkServer, tmp_path: Path, jobs: list[Job], ends: str, code: int
) -> None:
    """What a rule of ``policy.exit_codes`` goes by. Ratchet's own codes keep their meaning: 78 would never be tried again."""
    job = script_job(warm, tmp_path, f"import os, sys\n{ends}\n", world={"ranks_per_node": 1, "device": "cpu"})
    jobs.append(job)
    attempt = job.launch()
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.EXCEPTION, code), attempt.logs()
