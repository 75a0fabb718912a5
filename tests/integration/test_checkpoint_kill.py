"""Real ranks are killed at random instants of a training that saves after every step, beside its steps: what was acknowledged is
there afterwards, and holds what an undisturbed run had at that step, bit for bit.

``RATCHET_TEST_RANK_KILLS`` sets the number of kills (default 4).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from ratchet_contract.messages import CheckpointCommitted, RankMessage
from ratchet_contract.phases import Cause
from ratchet_store.compare import compare, render
from ratchet_store.lineage import find_base
from tests.support.launch import Attempt
from tests.support.server import wait_for
from tests.support.warm import Agent, Warm, WarmJob

KILLS = int(os.environ.get("RATCHET_TEST_RANK_KILLS", "4"))
STEPS = 60
CODE = Path(__file__).parents[1] / "support" / "fault_job"
_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 6 * KILLS))]


@pytest.fixture
def warm() -> Iterator[Warm]:
    with Warm() as made:
        yield made


def make_job(warm: Warm, home: Path, job_id: str, **checkpoint: Any) -> WarmJob:
    spec = {
        "task": {"entrypoint": "fault_task:Faulty", "args": {"steps": STEPS}},
        "code": {"path": str(CODE)},
        "hook": {"name": "powerSGD", "start_powerSGD_iter": 4},
        "checkpoint": {"every_steps": 1, **checkpoint},
    }
    return WarmJob(warm, home, spec, CODE, job_id=job_id)


def acknowledged(attempt: Attempt) -> list[CheckpointCommitted]:
    """What rank 0 has told as committed, in its own file; a kill may have torn the last line."""
    path = attempt.paths.spool(0)
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            message = _MESSAGE.validate_json(line)
        except ValidationError:
            break
        if isinstance(message, CheckpointCommitted):
            found.append(message)
    return found


def kill(attempt: Attempt, source: random.Random) -> str | None:
    """One rank, the agent, or all of them, at once; None: the attempt has ended by itself. Afterwards nothing of it is alive."""
    agent: Agent = attempt.agent  # type: ignore[assignment]
    ranks = agent.ranks()
    if len(ranks) < 2:
        return None
    victim = source.choice(["rank 0", "rank 1", "agent", "all"])
    pids = {"rank 0": [ranks[0]], "rank 1": [ranks[1]], "agent": [agent.pid]}.get(victim, [*ranks.values(), agent.pid])
    for pid in pids:
        with suppress(ProcessLookupError):  # it has died of the one before
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: agent.poll() is not None, "the agent to end", 60)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), "the ranks to end", 60)
    return victim


def test_what_ranks_have_acknowledged_is_there_after_any_kill(warm: Warm, tmp_path: Path) -> None:
    whole = make_job(warm, tmp_path, "whole", keep_last=STEPS)
    assert whole.launch().wait().cause is Cause.COMPLETED, whole.attempts[0].logs()
    assert len(whole.checkpoints()) == STEPS
    source, kills, ahead, lost, jobs = random.Random(11), 0, 0, 0, 0
    victims: set[str] = set()
    while kills < KILLS:
        jobs += 1
        job = make_job(warm, tmp_path, f"killed-{jobs}")
        try:
            while kills < KILLS and len(job.attempts) < 20:
                attempt = job.launch()
                wait_for(lambda: acknowledged(attempt) or attempt.agent.poll() is not None, attempt.logs(), 60, 0.002)  # noqa: B023
                time.sleep(source.uniform(0, 0.25))  # the point in time is the test's subject: any is right
                victim = kill(attempt, source)
                if victim is None:
                    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
                    break
                kills += 1
                victims.add(victim)
                told = acknowledged(attempt)[-1]
                manifest, moved = find_base(job.paths.checkpoints, job.paths.quarantine, job.lineage())
                assert manifest is not None and moved == [], attempt.logs()
                lost += max(0, told.step - manifest.step)
                ahead += manifest.step > told.step
                assert manifest.step in (told.step, told.step + 1)
                assert manifest.step > told.step or manifest.digest == told.digest
                at = f"step-{manifest.step:012d}"
                comparison = compare(whole.paths.checkpoints / f"{at}.a0001", job.paths.checkpoints / manifest.id)
                assert comparison.identical, f"{victims}, kill {kills}: {render(comparison)}"
        finally:
            job.close()
    print(f"{kills} kills of {sorted(victims)} in {jobs} jobs: {lost} acknowledged steps lost, {ahead} more were there")
    assert lost == 0 and kills == KILLS
