"""What must be true: where something begins, is taken or is settled, at that instant; and of the whole history at the end."""

from __future__ import annotations

from typing import Any

from ratchet_contract.phases import AttemptPhase, Cause, JobPhase
from ratchet_service.db import leases
from ratchet_service.lifecycle import goodput
from tests.support import invariants
from tests.support.sim_in_memory.agents import GONE, STARTING, Engine
from tests.support.sim_in_memory.database import LEASE, STEPS, Rows


class Checked(Rows):
    engine: Engine
    disk: dict[str, dict[tuple[int, int], bool]]
    fences: set[tuple[str, int]]
    reconcilers: list[Any]

    def check_single_live_attempt(self, agent: Any) -> None:
        """One live attempt that nothing fences, of one job."""
        for other in self.engine.agents:
            if other is not agent and other.job_id == agent.job_id and other.works and not other.out_of_reach:
                raise AssertionError(f"{agent.job_id}: {other.name} and {agent.name} are alive at one time")

    def check_lease_exclusive(self, one: Any) -> None:
        """Nobody else acts on a lease that this one holds, without asking again."""
        for other in self.reconcilers:
            if other is not one:
                for job_id in one.watches.keys() & other.watches.keys():
                    older = min(one.watches[job_id].lease_held_at, other.watches[job_id].lease_held_at)
                    assert older < self.t - LEASE * leases.SAFE_FRACTION, (
                        f"{job_id}: both {one.name} and {other.name} trust in its lease"
                    )

    def check_settled(self, job: Any, attempt: Any) -> None:
        """Nothing is settled while anything of it is alive. What was submitted too late finds the fence, and does not begin."""
        fenced = (job.id, attempt.number) in self.fences
        for agent in self.engine.agents:
            if agent.job_id == job.id and agent.attempt == attempt.number and not agent.out_of_reach:
                over = agent.state == GONE or (fenced and agent.state == STARTING)
                assert over and not agent.orphans, f"{agent.name} is settled, and alive"

    def check_deadline(self, lease: Any, cause: Any, limits: Any, timing: Any) -> None:
        """Nobody is ended before the time, whatever wall clocks show."""
        attempts = self.attempts[lease.job_id]
        least = {Cause.TIMEOUT: limits.timeout, Cause.LAUNCHER_ERROR: timing.launch_deadline}.get(cause, 0.0)
        began = attempts[0].at if cause is Cause.TIMEOUT else attempts[-1].at
        if cause in (Cause.API_CANCEL, Cause.HANG) and self.jobs[lease.job_id].wished is not None:
            least, began = limits.stop_grace, self.jobs[lease.job_id].wished
        assert self.t - began >= least, f"{lease.job_id}: {cause.value} after {self.t - began:.0f} s of {least:g}"

    def check_end(self) -> None:
        for job in self.jobs.values():
            attempts = self.attempts[job.id]
            faults = invariants.check_rows(job, attempts, invariants.check_history(self.events[job.id]))
            assert not faults, "; ".join(f"{job.id}: {fault}" for fault in faults)
            if job.phase is JobPhase.SUCCEEDED:
                assert job.step == job.committed_step == STEPS, f"{job.id} succeeded at step {job.step}"
                last = (STEPS, job.committed_attempt)
                assert self.disk[job.id].get(last), f"{job.id} succeeded without its last checkpoint"
                assert any((row.step, row.attempt) == last for row in self.checkpoints[job.id]), (
                    f"{job.id}: no row of {last}"
                )
            for one in attempts:
                self._check_time(one)
        assert not any(self.lent), f"slots are lent to nobody: {self.lent}"

    @staticmethod
    def _check_time(one: Any) -> None:
        """Every second of an attempt is in one part of its goodput."""
        assert one.phase is AttemptPhase.ENDED
        span = goodput.Span(one.created_at, one.ended_at, one.begun_at, one.training_at, steps_lost=one.steps_lost)
        wall = (one.ended_at - one.created_at).total_seconds()
        assert abs(goodput.parts_of(span).wall - wall) < 1e-6, f"{one.job_id}-a{one.number}: seconds are lost"
