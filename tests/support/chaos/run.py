"""One run: jobs are submitted and struck, then the faults stop, and every job has to come to its right end."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratchet_contract.phases import JobPhase
from tests.support.chaos import faults, resources
from tests.support.chaos.clients import Clients, Submitted, Tally
from tests.support.chaos.faults import Alive, alive_job
from tests.support.chaos.jobs import plans, reference
from tests.support.chaos.schedule import ACTIONS, Draw, Log, Struck, draw_faults, short_seconds
from tests.support.chaos.world import BASE_RATE, Part, World, wait_until

WIDTH: Final = 7
"""Jobs at one time that have not ended: more than there are slots for all of them."""
AHEAD: Final = 5
"""Jobs that have been submitted beyond their share in the faults."""
PATIENCE: Final = 20.0
"""Seconds that a fault waits for somebody whom it can meet."""
MEASURED: Final = 5.0
"""Seconds between two samples of the control plane's memory."""
END_DEADLINE: Final = 240.0
"""From the last fault until every job has ended."""


@dataclass(frozen=True)
class Wanted:
    """``jobs``: over how many the faults are spread; ``reals``: how many of them have real ranks; ``pace``: seconds from one
    fault to the next, on the average; ``pause``: those that a stand-in's step takes; ``longest_stop``: of a process; ``only``:
    these kinds of faults alone."""

    seed: int
    faults: int
    jobs: int
    reals: int = 0
    pace: float = 1.4
    pause: float = 0.2
    longest_stop: float = 20.0
    only: Sequence[str] = ()
    replay: Mapping[int, Struck] | None = None


class Run:
    """``play``; then ``jobs``, ``references`` and ``breaches`` are to be judged."""

    def __init__(self, world: World, wanted: Wanted, log: Log) -> None:
        self.world, self.wanted, self.log = world, wanted, log
        self.table = faults.table(world.engine, disk=world.disk)
        if not wanted.reals:  # only they have parked agents
            self.table = {name: entry for name, entry in self.table.items() if name not in faults.PARKED}
        if wanted.only:
            self.table = {name: entry for name, entry in self.table.items() if name in wanted.only}
        self.plans = plans(wanted.seed, wanted.jobs, wanted.reals, world.notes, wanted.pause, world.planted)
        self.jobs: list[Submitted] = []
        self.references: dict[str, str] = {}
        self.tally = Tally()
        self.breaches: list[str] = []
        self.began = time.monotonic()
        self._count = itertools.count()
        self._later: list[tuple[float, int, str, Callable[[], None]]] = []
        self._down: set[str] = set()
        self._trouble = 0.0  # when the database or the disk was last away
        self.clients = Clients(world, self.tally, wanted.seed)
        self._looked = self._measured = 0.0
        self.memory: list[int] = []
        self.struck_hand_overs = 0

    # --- what faults need (``faults.Stage``) ---

    @property
    def longest_stop(self) -> float:
        return self.wanted.longest_stop

    def alive(self) -> list[Alive]:
        known = [(job.plan, job.job_id) for job in self.jobs if job.job_id is not None and not job.has_ended]
        found = [alive_job(plan.number, job_id, plan.real, self.world.newest(job_id)) for plan, job_id in known]
        return [one for one in found if one is not None]

    def schedule(self, seconds: float, what: str, deed: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._count), what, deed))

    def mark_down(self, part: Part, seconds: float) -> None:
        self._down.add(part.name)

        def again() -> None:
            self._down.discard(part.name)
            part.start()

        self.schedule(seconds, f"{part.name} is started", again)

    # --- the run ---

    def play(self) -> None:
        """Raises ``AssertionError`` where even the undisturbed jobs do not end."""
        wait = True
        try:
            self._undisturbed()
            self.before = resources.settle(self.world)
            self.began = time.monotonic()
            self.world.relay.rate = BASE_RATE
            self._strike_all()
            self._finish()
            self.struck_hand_overs = len(list(self.world.stage.glob("*.hand-over.*")))
            self.after = resources.settle(self.world, self.before)
            self.breaches += [f"left behind: {text}" for text in self.after.surplus(self.before)]
            self.breaches += [text for text in [resources.growth(self.memory)] if text is not None]
        except (SystemExit, KeyboardInterrupt):
            wait = False
            raise
        finally:
            self.clients.close(wait=wait)

    def _undisturbed(self) -> None:
        """One job of each kind, first of all: what the others must come to."""
        kinds = sorted({plan.kind for plan in self.plans})
        specs = {kind: reference(kind, self.world.notes) for kind in kinds}
        self.references = {kind: self.clients.submit(spec, f"reference {kind}") for kind, spec in specs.items()}

        def done() -> bool:
            phases = self.world.phases() or {}
            return all(phases.get(one, (None,))[0] is JobPhase.SUCCEEDED for one in self.references.values())

        assert wait_until(done, 300), f"undisturbed jobs did not end: {self.world.phases()}"

    def _strike_all(self) -> None:
        weights = {name: weight for name, (_, weight) in self.table.items()}
        replay = self.wanted.replay
        struck, due = 0, time.monotonic()
        for draw in draw_faults(self.wanted.seed, weights, self.wanted.pace):
            if struck >= self.wanted.faults:
                return
            if replay is not None and draw.number > max(replay, default=0):
                return
            recorded = None if replay is None else replay.get(draw.number)
            if replay is not None and recorded is None:
                continue  # it met nobody then
            due = self.began + recorded.at if recorded is not None else max(due + draw.after, time.monotonic() - 1)
            share = self.wanted.jobs * (struck + 1) / self.wanted.faults
            self._wait(lambda due=due: time.monotonic() >= due)  # type: ignore[misc]
            self._wait(lambda share=share: len(self.jobs) + 1 > share, fill=share + AHEAD)  # type: ignore[misc]
            struck += self._strike_victim(draw, recorded)
            if draw.action is not None:
                self._act(draw)

    def _strike_victim(self, draw: Draw, recorded: Struck | None) -> bool:
        """Strike as soon as there is somebody; whether there was."""
        fault, met = self.table[draw.kind][0], None

        def struck() -> bool:
            nonlocal met
            met = fault.strike(self, draw, None if recorded is None else recorded.victim)
            return met is not None

        end = time.monotonic() + (0 if draw.kind in faults.PARKED else PATIENCE)
        self._wait(lambda: struck() or time.monotonic() > end or self._all_ended())
        if met is None:
            return False
        if draw.kind in ("database", "full-disk"):
            self._trouble = time.monotonic()
        self._note(draw.number, draw.kind, *met)
        self.tally.faults[draw.kind] += 1
        return True

    def _all_ended(self) -> bool:
        """There is nobody, and nobody will come."""
        return len(self.jobs) == len(self.plans) and all(job.has_ended for job in self.jobs)

    def _finish(self) -> None:
        """No more faults: what is stopped goes on, what is away comes back; then all jobs end."""
        self._wait(lambda: not self._later, deadline=60)
        self.world.relay.rate, self.world.relay.down = 0.0, False
        self._note(0, "calm", "all", "no more faults")
        end = time.monotonic() + END_DEADLINE
        self._wait(self._all_ended, fill=len(self.plans), deadline=END_DEADLINE)
        for job in self.jobs:
            if not job.has_ended:
                self.breaches.append(
                    f"job {job.plan.number} ({job.job_id}): lost: {job.phase} {END_DEADLINE:.0f} s after the last fault"
                )
        if not wait_until(lambda: not self.world.job_processes(), max(10.0, min(30.0, end - time.monotonic()))):
            self.breaches += [f"orphan: {_named(pid)}" for pid in self.world.job_processes()]

    def _wait(self, condition: Callable[[], bool], *, fill: float = 0.0, deadline: float = 600.0) -> None:
        """Until it is true, while everything else goes on. ``fill``: jobs are submitted up to that many."""
        end = time.monotonic() + deadline
        while True:
            self._turn(fill)
            if condition() or time.monotonic() > end:
                return
            time.sleep(0.02)

    def _turn(self, fill: float) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _, _, what, deed = heapq.heappop(self._later)
            deed()
            if "database" in what or "disk" in what:
                self._trouble = time.monotonic()
            self._note(0, "then", what, "")
        for part in self.world.parts:
            if not part.alive and part.name not in self._down:
                self._ended(part)
        if now - self._looked >= 0.3:
            self._poll()
            self._looked = now
        if now - self._measured >= MEASURED:
            if (memory := resources.control_plane_memory(self.world)) is not None:
                self.memory.append(memory)
            self._measured = now
        running = sum(not job.has_ended for job in self.jobs)
        if running < WIDTH and len(self.jobs) < min(
            len(self.plans), max(fill, len(self.jobs) + 1 if not running else 0)
        ):
            plan = self.plans[len(self.jobs)]
            self.jobs.append(self.clients.begin(plan))

    def _ended(self, part: Part) -> None:
        """A process that has ended at a hand-over, or that nobody has killed: right where it could not start for want of a
        database or of room."""
        if part.killed.exists():
            part.killed.unlink()
            part.wait()
            self.mark_down(part, 0.5)
            return
        if time.monotonic() - self._trouble < 40 and part.wait() == 3:
            self.tally.restarts += 1
            self.mark_down(part, 0.5)
            return
        self.breaches.append(f"{part.name} ended by itself with {part.wait()}:\n{part.log()[-3000:]}")
        self.mark_down(part, 0.5)

    def _poll(self) -> None:
        for job in self.jobs:
            if job.job_id is None:
                job.job_id = next(iter(job.ids), None)
        phases = self.world.phases()
        for job in self.jobs if phases is not None else []:
            assert phases is not None
            phase, reason = phases.get(job.job_id or "", (None, None))
            if phase is None:
                continue
            job.phase = phase
            now = time.monotonic()
            if phase is JobPhase.FAILED and reason == "no-progress":
                job.phase = JobPhase.QUEUED
                if now - job.resumed_at > 5:
                    job.resumed_at = now
                    self.tally.resumed += 1
                    self.clients.call(job, "resume")
            elif phase is JobPhase.SUSPENDED and now - job.resumed_at > 5:
                job.resumed_at = now
                self.clients.call(job, "resume")

    def _act(self, draw: Draw) -> None:
        """An action of the API, on a job that has not ended. What is refused by the phase is refused."""
        assert draw.action in ACTIONS
        running = [job for job in self.jobs if not job.has_ended and job.job_id is not None]
        among = [job for job in running if job.plan.cancelled] if draw.action == "cancel" else running
        if not among:
            return
        job = among[int(draw.pick_part * len(among))]
        self._note(0, draw.action, f"job {job.plan.number}", "")
        self.clients.call(job, "checkpoint_now" if draw.action == "checkpoint" else draw.action)
        if draw.action == "suspend":
            job.resumed_at = time.monotonic() + short_seconds(draw.size, 6.0) - 5

    def _note(self, number: int, kind: str, victim: str, detail: str) -> None:
        self.log.add(Struck(round(time.monotonic() - self.began, 3), number, kind, victim, detail))


def _named(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = ""
    return f"process {pid}: {command.strip()}"
