"""Real ranks are killed at random instants of a training that saves after every step, beside its steps: what was acknowledged is
there afterwards, and holds what an undisturbed run had at that step, bit for bit. The control, by the same kills: ``torch.save``
over one file.

``RATCHET_TEST_RANK_KILLS`` sets the number of kills (default 4), and a tenth of them for the control.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import CheckpointCommitted, RankMessage
from ratchet_store.read.compare import compare, render
from ratchet_store.read.find_base import find_base
from tests.support.forked_attempts import Agent, AttemptForkServer, ForkedJob
from tests.support.launch import Attempt
from tests.support.server import wait_for

KILLS = int(os.environ.get("RATCHET_TEST_RANK_KILLS", "4"))
STEPS = 60
CODE = Path(__file__).parents[3] / "support" / "fault_job"
_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 4 * KILLS))]


@pytest.fixture(scope="module")
def warm() -> Iterator[AttemptForkServer]:
    with AttemptForkServer() as made:
        yield made


def make_job(
    warm: AttemptForkServer, home: Path, job_id: str, args: dict[str, Any] | None = None, **checkpoint: Any
) -> ForkedJob:
    spec = {
        "task": {"entrypoint": "fault_task:Faulty", "args": args or {"steps": STEPS}},
        "code": {"path": str(CODE)},
        "hook": {"name": "powerSGD", "start_powerSGD_iter": 4},
        "checkpoint": {"every_steps": 1, **checkpoint},
    }
    return ForkedJob(warm, home, spec, CODE, job_id=job_id)


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


def moment(attempt: Attempt, source: random.Random, begun: Callable[[], object], saves: Callable[[], object]) -> None:
    """Some instant of a save, or a little later. The point in time is the tests' subject: any is right."""
    alive = attempt.agent.poll
    wait_for(lambda: begun() or alive() is not None, f"the first save\n{attempt.logs()}", 60, 0.002)
    time.sleep(source.uniform(0, 0.2))
    wait_for(lambda: saves() or alive() is not None, f"a save\n{attempt.logs()}", 60, 0.0005)
    time.sleep(source.uniform(0, 0.015))


def shrinks(path: Path, seen: list[int]) -> bool:
    """Is it being written anew?"""
    seen.append(path.stat().st_size)
    return seen[-1] < seen[-2]


VICTIMS = ("rank 0", "rank 1", "agent", "all")


def kill(attempt: Attempt, victim: str) -> bool:
    """One rank, the agent, or all of them, at once; False: the attempt has ended by itself. Afterwards nothing of it is alive."""
    agent: Agent = attempt.agent  # type: ignore[assignment]
    ranks = agent.ranks()
    if len(ranks) < 2:
        return False
    left = [Agent(pid) for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    pids = {"rank 0": [ranks[0]], "rank 1": [ranks[1]], "agent": [agent.pid]}.get(victim, [*ranks.values(), agent.pid])
    for pid in pids:
        with suppress(ProcessLookupError):  # it has died of the one before
            os.kill(pid, signal.SIGKILL)
    for process in (agent, *left):
        process.wait(60)
    return True


def under_way(job: ForkedJob, attempt: int) -> str | None:
    """How far the save is that is being made, or that a kill has cut."""
    for directory in job.paths.checkpoints.glob(f"step-*.a{attempt:04d}"):
        try:
            names = {path.name for path in directory.iterdir()}
        except FileNotFoundError:  # retention's
            continue
        if DELETED_MANIFEST_NAME in names:
            continue
        if any(name.startswith(f".{MANIFEST_NAME}.") for name in names):
            return "manifest written"
        if MANIFEST_NAME not in names:
            return (
                "rank files written"
                if not names or any(name.endswith(".tmp") for name in names)
                else "rank files whole"
            )
    return None


class Tally:
    """What came of the kills; printed on the way and at the end."""

    def __init__(self, of: int) -> None:
        self.of, self.kills, self.lost, self.ahead, self.began = of, 0, 0, 0, time.monotonic()
        self.victims, self.within = Counter[str](), Counter[str]()

    def add(self, victim: str, within: str | None, lost: int, ahead: int) -> None:
        self.kills, self.lost, self.ahead = self.kills + 1, self.lost + lost, self.ahead + ahead
        self.victims[victim] += 1
        self.within.update([within] if within is not None else [])
        if self.kills % max(10, self.of // 40) == 0 or self.kills == self.of:
            print(self, flush=True)

    def __str__(self) -> str:
        each = (time.monotonic() - self.began) / max(1, self.kills)
        within = f"{self.within.total()} within a save {dict(sorted(self.within.items()))}"
        return (
            f"{self.kills} of {self.of} kills {dict(sorted(self.victims.items()))}: {within}, {self.lost} acknowledged steps "
            f"lost, {self.ahead} more were there; {each:.2f} s each"
        )


def test_acknowledged_checkpoints_survive_kills_at_random_instants(warm: AttemptForkServer, tmp_path: Path) -> None:
    whole = make_job(warm, tmp_path, "whole", keep_last=STEPS)
    assert whole.launch().wait().cause is Cause.COMPLETED, whole.attempts[0].logs()
    assert len(whole.checkpoints()) == STEPS
    source, tally, jobs = random.Random(11), Tally(KILLS), 0
    while tally.kills < KILLS:
        jobs += 1
        job = make_job(warm, tmp_path, f"killed-{jobs}")
        try:
            while tally.kills < KILLS and len(job.attempts) < 20:
                attempt = job.launch()
                moment(attempt, source, partial(acknowledged, attempt), partial(under_way, job, attempt.attempt))
                victim = source.choice(VICTIMS)
                if not kill(attempt, victim):
                    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
                    break
                told, within = acknowledged(attempt)[-1], under_way(job, attempt.attempt)
                manifest, moved = find_base(job.paths.checkpoints, job.paths.quarantine, job.lineage())
                assert manifest is not None and moved == [], attempt.logs()
                tally.add(victim, within, max(0, told.step - manifest.step), manifest.step > told.step)
                assert manifest.step in (told.step, told.step + 1)
                assert manifest.step > told.step or manifest.digest == told.digest
                at = f"step-{manifest.step:012d}"
                comparison = compare(whole.paths.checkpoints / f"{at}.a0001", job.paths.checkpoints / manifest.id)
                assert comparison.identical, f"{tally}: {render(comparison)}"
        finally:
            job.close()
        shutil.rmtree(job.paths.root)
    print(f"{tally.kills - tally.lost} of {KILLS} kills in {jobs} jobs lost nothing that was acknowledged")
    assert tally.lost == 0 and tally.kills == KILLS
    assert KILLS < 20 or tally.within.total() > KILLS // 5, "hardly any kill fell into a save: the test does not test"


def test_control_with_in_place_torch_save_loses_acknowledged_saves(warm: AttemptForkServer, tmp_path: Path) -> None:
    source, lost, kills = random.Random(11), 0, 0
    while kills < max(2, KILLS // 10) or (lost <= kills // 10 and kills < 20):
        folder = tmp_path / f"control-{kills}"
        folder.mkdir()
        job = make_job(
            warm,
            tmp_path,
            folder.name,
            {"steps": 10_000, "width": 6000, "in_place": str(folder / "model.pt")},
            every_steps=10**6,
        )
        told, model = folder / "told", folder / "model.pt"
        try:
            attempt = job.launch()
            moment(attempt, source, told.exists, partial(shrinks, model, [0]))
            assert kill(attempt, source.choice(VICTIMS)), attempt.logs()
        finally:
            job.close()
        kills += 1
        try:
            lost += torch.load(model, weights_only=True)["step"] + 1 < told.stat().st_size
        except Exception:  # of many kinds
            lost += 1
        shutil.rmtree(folder)
        shutil.rmtree(job.paths.root)
    print(f"{kills} kills of ranks that torch.save in place: {lost} times nothing could be loaded", flush=True)
    assert lost > kills // 10, "the harness does not tell a good way to save from a bad one"
