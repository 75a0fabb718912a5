"""Real ranks are killed at random instants of a training that copies its state to memory after every step: each time at most one
finished step is lost, what the agent saves is bit for bit what an undisturbed run had, and no memory is left over.

``RATCHET_TEST_MEMORY_KILLS`` sets the number of kills (default 6).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare, render
from tests.support.forked_attempts import AttemptForkServer, ForkedJob
from tests.support.launch import Attempt
from tests.support.server import wait_for

KILLS = int(os.environ.get("RATCHET_TEST_MEMORY_KILLS", "6"))
STEPS = 60
CODE = Path(__file__).parents[3] / "support" / "fault_job"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 6 * KILLS))]


@pytest.fixture(scope="module")
def warm() -> Iterator[AttemptForkServer]:
    with AttemptForkServer() as made:
        yield made


def make_job(warm: AttemptForkServer, home: Path, job_id: str, **checkpoint: object) -> ForkedJob:
    spec = {
        "task": {"entrypoint": "fault_task:Faulty", "args": {"steps": STEPS}},
        "code": {"path": str(CODE)},
        "hook": {"name": "powerSGD", "start_powerSGD_iter": 4},
        "checkpoint": {"first": "off", **checkpoint},
    }
    return ForkedJob(warm, home, spec, CODE, job_id=job_id)


def last_finished(attempt: Attempt) -> int:
    """The last step that any rank has finished in this attempt; 0: none."""
    readings = [attempt.reading(rank) for rank in (0, 1)]
    return max(reading.finished if reading is not None else 0 for reading in readings)


def kill_a_rank(attempt: Attempt, source: random.Random, step: int) -> bool:
    """After ``step``, or a little later. False: the attempt has ended by itself."""
    ended = attempt.agent.poll
    wait_for(
        lambda: last_finished(attempt) >= step or ended() is not None, f"step {step}\n{attempt.logs()}", 60, 0.0005
    )
    time.sleep(source.uniform(0, 0.01))  # the instant is the test's subject: any is right
    with suppress(ProcessLookupError, KeyError):
        os.kill(attempt.agent.ranks()[source.randrange(2)], signal.SIGKILL)  # type: ignore[union-attr]
    return attempt.wait(60).cause is not Cause.COMPLETED


def test_kills_at_random_instants_lose_at_most_one_finished_step(warm: AttemptForkServer, tmp_path: Path) -> None:
    whole = make_job(warm, tmp_path, "whole", every_steps=1, keep_last=STEPS)
    assert whole.launch().wait().cause is Cause.COMPLETED, whole.attempts[0].logs()
    source, lost, kills, jobs = random.Random(7), Counter[int](), 0, 0
    shared = {*Path("/dev/shm").iterdir()}
    while kills < KILLS:
        jobs += 1
        job = make_job(warm, tmp_path, f"killed-{jobs}", every_steps=10**6, memory_every_steps=1)
        try:
            step = 0
            while kills < KILLS:
                attempt = job.launch()
                if not kill_a_rank(attempt, source, step + source.randint(1, 8)):
                    break
                kills += 1
                if not job.checkpoints():  # killed before the end of step 2
                    lost[last_finished(attempt)] += 1
                    continue
                manifest = read_manifest(job.newest())
                lost[max(0, last_finished(attempt) - manifest.step)] += 1
                assert manifest.reason == "memory", attempt.logs()
                at = whole.paths.checkpoints / f"step-{manifest.step:012d}.a0001"
                comparison = compare(at, job.newest())
                assert comparison.identical, render(comparison)
                step = manifest.step
        finally:
            job.close()
        shutil.rmtree(job.paths.root)
    print(f"{kills} kills in {jobs} jobs: finished steps lost, and how often: {dict(sorted(lost.items()))}")
    assert {*lost} <= {0, 1}
    assert not [path for path in {*Path("/dev/shm").iterdir()} - shared if "ratchet" in path.name]
