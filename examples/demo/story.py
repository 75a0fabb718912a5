"""What happens to the two jobs, told while it happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from examples.demo.picture import Interruption
from examples.demo.processes import DemoError, Service, living, rank_pid, reported_step, wait_for
from ratchet_contract.api import AttemptView, HookView, JobView
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import AttemptPhase
from ratchet_worker.ipc.progress_counter import CounterReader

START_COMPRESSION = 60
EVERY = 50
"""Steps between checkpoints."""
KILL, PREEMPT, ORPHAN = 120, 210, 300
"""Steps of the 1760 from which on the rank is killed, the job preempted, and the service killed."""
PATIENT = 800
"""Step up to which the kill waits for a parked agent. Its imports run at low priority, while the ranks use all cores."""
SPEC: dict[str, Any] = {
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 80}},
    "world": {"ranks_per_node": 2, "device": "cpu"},
    "resources": {"cpus_per_rank": 1},
    "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": START_COMPRESSION},
    "checkpoint": {"every_steps": EVERY, "keep_last": 2},
    "policy": {"backoff": "0.2s"},
}
_START, _TRAIN = 90.0, 240.0
"""Seconds within which a group must have started, and a job must have ended."""


def say(text: str = "") -> None:
    print(text, flush=True)


@dataclass
class Story:
    """The demo's actions on one service; ``faults`` collects everything that was not as it should be."""

    service: Service
    marks: list[Interruption] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def expect(self, true: bool, sentence: str) -> None:
        say(f"  {'ok' if true else 'NOT'}: {sentence}")
        if not true:
            self.faults.append(sentence)

    # --- acts ---------------------------------------------------------------------------------------------------------

    def interrupted(self) -> JobView:
        """Submit the job, interrupt it three times, and wait for its end."""
        job = self._submit("digits-interrupted")
        self._kill_a_rank(job)
        self._preempt(job)
        self._kill_the_service(job)
        return self._finish(job)

    def undisturbed(self) -> JobView:
        return self._finish(self._submit("digits-undisturbed"))

    def _submit(self, name: str) -> JobView:
        job = self.service.client.submit({"name": name, **SPEC}).view
        say(f"  submitted {name}: the service calls it {job.id}")
        say(f"  its page in a browser, live: {self.service.url}/#/jobs/{job.id}")
        return job

    def _kill_a_rank(self, job: JobView) -> None:
        say("\n2. Kill a rank. One of the two training processes gets SIGKILL, which nothing can catch.")
        self._compressing(job, 1, KILL)
        self._until(
            job, "a parked agent", lambda now: self.service.count_parked() > 0 or now.progress.step >= PATIENT, _START
        )
        if self.service.count_parked():
            say("  the service has parked an agent: a process that has made the imports of the next start")
        paths = self._attempt_paths(job, 1)
        pid = wait_for("rank 1's process id", lambda: rank_pid(paths, 1), 10.0, paths.root)
        alive = self._running(job, 1)
        os.kill(pid, signal.SIGKILL)
        say(f"  killed rank 1 of attempt 1 (process {pid})")
        seconds, start = self._next_step(job, 2)
        say(f"  {seconds:.1f} s from SIGKILL to the next step ({start} start)")
        ended = self._ended(job, 1)
        self.expect(
            alive and ended.cause == "rank-killed", f"attempt 1 was training and ended with cause {ended.cause}"
        )
        self._mark(job, ended, "rank killed (SIGKILL)", "#d62828")

    def _next_step(self, job: JobView, attempt: int) -> tuple[float, str]:
        """Wait for the attempt's first step. Returns the seconds until then, and whether its start was parked or cold."""
        begin, paths = time.monotonic(), self._attempt_paths(job, attempt)
        counter = CounterReader(paths.counter(0))
        while (found := counter.read()) is None or not found.finished:
            if time.monotonic() - begin > _START:
                raise DemoError(f"waited {_START:.0f} s for a step of attempt {attempt}, in vain. Logs: {paths.root}")
            time.sleep(0.005)
        seconds = time.monotonic() - begin
        return seconds, "parked" if "start: parked" in paths.node(0).agent_log.read_text() else "cold"

    def _preempt(self, job: JobView) -> None:
        say("\n3. Preempt over REST. The group agrees on a step, saves a checkpoint, and leaves the machine.")
        self._resumed(job, 2, PREEMPT)
        alive = self._running(job, 2)
        self.service.client.preempt(job.id)
        ended = self._ended(job, 2)
        self.expect(
            alive and ended.cause == "api-preempt", f"attempt 2 was training and ended with cause {ended.cause}"
        )
        self._mark(job, ended, "preempted over REST", "#6a4c93")

    def _kill_the_service(self, job: JobView) -> None:
        say("\n4. Kill the service. Training goes on without it; a new service finds the job again.")
        self._resumed(job, 3, ORPHAN)
        paths = self._attempt_paths(job, 3)
        alive = self._running(job, 3)
        self.service.kill()
        before = reported_step(paths)
        say(f"  killed the service (SIGKILL) at step {before}; nobody answers now")
        after = wait_for(
            "steps done without a service",
            lambda: (s := reported_step(paths)) >= before + EVERY and s,
            60.0,
            paths.root,
        )
        still = bool(living(self.service.home))
        self.expect(alive and still, f"training went on without the service: from step {before} to step {after}")
        # at the same address, so that an open page goes on
        say(f"  started the service again: {self.service.start(urlsplit(self.service.url).port or 0)}")
        newest = self.service.client.view(job.id)
        self.expect(
            newest.attempt == 3, f"the new service found attempt {newest.attempt} again; the job is {newest.phase}"
        )
        self.marks.append(Interruption(before, None, "service killed (SIGKILL)", "#2a9d8f"))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _finish(self, job: JobView) -> JobView:
        ended: JobView = self._until(job, f"{job.name} to end", lambda j: j if j.phase.terminal else None, _TRAIN)
        self.expect(ended.phase == "SUCCEEDED", f"{job.name} ended as {ended.phase} at step {ended.progress.step}")
        return ended

    def _until(self, job: JobView, what: str, happened: Callable[[JobView], Any], seconds: float) -> Any:
        """Poll the job and show its progress about once a second until ``happened(job)`` is true."""
        shown = 0.0

        def look() -> Any:
            nonlocal shown
            now = self.service.client.view(job.id)
            if time.monotonic() - shown > 3.0 and now.phase == "RUNNING" and now.progress.step:
                say(f"    step {now.progress.step:>5} of {now.progress.total_steps}   {self._hook_words(job)}")
                shown = time.monotonic()
            if now.phase == "FAILED" and not happened(now):
                raise DemoError(
                    f"{job.name} failed: {now.message or now.reason}. Logs: {self._paths(job).root}/attempts"
                )
            return happened(now)

        return wait_for(what, look, seconds, self._paths(job).root / "attempts")

    def _hook_words(self, job: JobView) -> str:
        hook = self.service.client.hook(job.id)
        rate = "" if hook.compression_rate in (None, 1.0) else f", {hook.compression_rate:.1f} times fewer numbers sent"
        return f"PowerSGD {hook.phase or 'not started'}, iteration {hook.iteration or 0}{rate}"

    def _compressing(self, job: JobView, attempt: int, step: int) -> None:
        """Wait until the hook compresses and a checkpoint holds its state from after the start of compression."""

        def happened(now: JobView) -> bool:
            hook: HookView = self.service.client.hook(job.id)
            return (
                now.attempt == attempt and now.phase == "RUNNING" and hook.phase == "compressing"
                and (hook.checkpoint_iteration or 0) > START_COMPRESSION and now.progress.step >= step
            )  # fmt: skip

        self._until(job, f"attempt {attempt} of {job.name} to compress beyond step {step}", happened, _START)

    def _resumed(self, job: JobView, number: int, step: int) -> None:
        """Wait until attempt ``number`` has gone some steps beyond the checkpoint it resumed from, and beyond ``step``."""

        def happened(now: JobView) -> bool:
            if now.attempt != number or now.phase != "RUNNING":
                return False
            base = self.service.client.attempt(job.id, number).base
            return base is not None and now.progress.step >= max(step, base.step + EVERY // 2)

        self._until(job, f"attempt {number} of {job.name} to train again", happened, _START)
        attempt = self.service.client.attempt(job.id, number)
        assert attempt.base is not None
        verdict = attempt.resume_report.verdict if attempt.resume_report else "missing"
        self.expect(
            attempt.base.step > START_COMPRESSION and verdict == "exact",
            f"attempt {number} resumed from step {attempt.base.step}; its resume report says: {verdict}",
        )

    def _running(self, job: JobView, number: int) -> bool:
        return self.service.client.attempt(job.id, number).phase is AttemptPhase.RUNNING

    def _ended(self, job: JobView, number: int) -> AttemptView:
        def look() -> AttemptView | None:
            attempt = self.service.client.attempt(job.id, number)
            return attempt if attempt.phase is AttemptPhase.ENDED else None

        found: AttemptView = wait_for(f"attempt {number} to end", look, 60.0, self._attempt_paths(job, number).root)
        return found

    def _mark(self, job: JobView, ended: AttemptView, label: str, colour: str) -> None:
        self.marks.append(Interruption(ended.last_step, ended.committed_step, label, colour))

    def _paths(self, job: JobView) -> JobPaths:
        return JobPaths(self.service.home / "jobs" / job.id)

    def _attempt_paths(self, job: JobView, number: int) -> AttemptPaths:
        return self._paths(job).attempt(number)
