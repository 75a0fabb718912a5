"""What a job has had in its code, arguments, variables, tensors and files is not found by a later job: not of another owner, and
of the same owner neither in a parked agent nor, if it was a secret, in any."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher
from tests.integration.service.launchers.test_standby import DIGEST, Machine, _at_once, machine
from tests.support import memory_scan
from tests.support.full_matrix import full
from tests.support.memory_scan import Mark, places

__all__ = ["_at_once", "machine"]  # fixtures
SPREAD = """
import os, sys, time
from pathlib import Path
import torch
MARK = "%s"
assert MARK in sys.argv
os.environ["OF_THE_JOB"] = MARK
tensor = torch.frombuffer(bytearray(MARK.encode() * 1000), dtype=torch.uint8).clone()
out = Path(os.environ["RATCHET_ATTEMPT_DIR"], "dump-" + os.environ["RANK"])
kept = open(out.with_name(MARK), "w+")
kept.write(MARK)
kept.flush()
print(MARK, flush=True)
out.write_text("{}")
time.sleep(3600)
"""
FIRST, SECOND, THIRD = (f"job-00000000000{letter}" for letter in "abc")


class Jobs:
    """The jobs of a machine whose code has a mark."""

    def __init__(self, made: Machine) -> None:
        self.machine, self.text = made, secrets.token_hex(32)
        self.mark = Mark.of(self.text.encode())
        code = made.home.code / DIGEST
        (code / "spread.py").write_text(SPREAD % self.text)
        (code / "scan.py").write_text(Path(memory_scan.__file__).read_text())

    def spread(self, **more: Any) -> int:
        """Run the first job, which has the mark everywhere, until an agent is parked, and end it. Return its pid."""
        plan = self._plan(FIRST, script=["spread.py", self.text], **more)
        self.machine.start(plan)
        pid = self.machine.wait_parked(plan.ref)
        rank = next(iter(self.machine.launcher._pids(plan.ref)))
        ranks = [one for one in self.machine.launcher._pids(plan.ref) if places(one, self.mark)]
        found = " ".join(places(ranks[-1], self.mark)) if ranks else f"nothing in {rank}"
        for where in ("memory", "descriptor", self.text):
            assert where in found
        self.machine.end(plan.ref)
        (self.machine.home.code / DIGEST / "spread.py").unlink()  # agents copy the code of their own job
        return pid

    def scan(self, job: str, **more: Any) -> tuple[int, dict[str, list[str]]]:
        """Run a job that looks for the mark. Return its agent's pid, and where it has found it."""
        plan = self._plan(job, script=["scan.py", *self.mark.arguments()], **more)
        agent = self.machine.start(plan)
        (found,) = self.machine.dumps(plan.ref)
        assert self.machine.was_parked(plan.ref) or "start: parked" not in plan.ref.paths.node(0).agent_log.read_text()
        self.machine.end(plan.ref)
        return agent, found

    def _plan(self, job: str, **more: Any) -> LaunchPlan:
        return self.machine.plan(job, world={"ranks_per_node": 1, "device": "cpu"}, **more)


NOTHING: dict[str, list[str]] = {"rank": [], "agent": []}


def test_later_jobs_find_nothing_of_a_former_job(machine: Any) -> None:
    jobs = Jobs(machine())
    pid = jobs.spread()
    agent, found = jobs.scan(SECOND, owner="bob")
    assert agent != pid and found == NOTHING
    agent, found = jobs.scan(THIRD)
    assert agent == pid and found == NOTHING


@full
def test_secret_is_found_by_no_other_job(machine: Any) -> None:
    jobs = Jobs(machine())
    pid = jobs.spread(env={"KEY": jobs.text}, secret_env=["KEY"])
    assert places(pid, jobs.mark), "it waits for another attempt of this job"
    for job, owner in ((SECOND, "bob"), (THIRD, "ann")):
        agent, found = jobs.scan(job, owner=owner)
        assert agent != pid and found == NOTHING


@full
def test_mark_that_a_parked_agent_keeps_is_found(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, park = Jobs(machine()), LocalLauncher._park

    def keep(self: Any, env: Any, *more: Any) -> int:
        return park(self, {**env, "KEPT": jobs.text}, *more)

    monkeypatch.setattr(LocalLauncher, "_park", keep)
    pid = jobs.spread()
    agent, found = jobs.scan(SECOND)
    assert agent == pid
    assert "environ" in found["agent"] and any(one.startswith("memory") for one in found["rank"])
