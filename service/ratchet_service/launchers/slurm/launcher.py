"""Attempts as batch jobs of Slurm, with one agent per node. An attempt is over only once Slurm reports no live job of it.
Agents that still run on a lost node are fenced: the service refuses their reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars as names
from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineEnd,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.plan import agent_environment, rank_commands, secret_sources
from ratchet_service.launchers.slurm import batch_script, job_status, spec_checks
from ratchet_service.launchers.slurm.commands import Commands, Refused
from ratchet_service.launchers.slurm.job_status import JobRecord
from ratchet_service.launchers.slurm.settings import Settings, parse_settings
from ratchet_service.launchers.slurm.squeue import Queue

_FAST_POLL_SECONDS: Final = 0.3
"""Seconds between two queries of squeue once all agents have left their results: the next attempt waits for the job's end."""
_FAST_POLL_FOR_SECONDS: Final = 10.0
_CANCEL_INTERVAL_SECONDS: Final = 5.0
"""Seconds between two cancellations of a job that does not end."""
_ACCOUNTING_PATIENCE_SECONDS: Final = 300.0
"""Seconds for which an attempt whose job squeue has forgotten waits for an accounting that does not answer."""
_RETENTION_SECONDS: Final = 3600.0
"""Seconds for which this process remembers its actions and observations."""


def make(home: HomePaths, settings: Mapping[str, Any]) -> SlurmLauncher:
    """Return the Slurm launcher. Raises ``ValueError`` for invalid settings."""
    return SlurmLauncher(home, parse_settings(settings))


class SlurmLauncher:
    """Runs attempts as batch jobs of Slurm. ``environ``: the environment that batch jobs inherit from; None: this process's."""

    kind = "slurm"
    max_nodes: int | None = None
    slots = False
    same_files = True
    excludes_nodes = True

    def __init__(self, home: HomePaths, settings: Settings, environ: Mapping[str, str] | None = None) -> None:
        self._home = home
        self._settings = settings
        self._environ = dict(os.environ if environ is None else environ)
        self._commands = Commands(settings.commands, settings.command_seconds, self._environ)
        self._queue = Queue(self._commands, settings.poll_seconds)
        self._comment = batch_script.job_comment(home)
        self._submitted_at: dict[
            str, float
        ] = {}  # name -> time of submission; an earlier answer of squeue does not contain the job
        self._results_seen_at: dict[str, float] = {}  # name -> time when all its agents' results were first seen
        self._ended_seen_at: dict[str, float] = {}  # name -> time when it was first seen to be over
        self._accounting_jobs: dict[str, list[JobRecord]] = {}
        self._cancelled_at: dict[int, float] = {}

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return warnings and problems of the spec (``spec_checks.check``)."""
        return spec_checks.check(spec, self._settings.effective_launcher(spec))

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """Return the plan with the batch script and the command that submits it."""
        argv = batch_script.agent_command(launch, self._settings)
        paths = AttemptPaths(Path(launch.attempt_dir))
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.attempt, paths, launch.spec.world.nodes),
            launch=launch,
            argv=argv,
            env={names.ATTEMPT_DIR: launch.attempt_dir},
            secrets=secret_sources(launch.spec),
            ranks=rank_commands(launch, argv[0]),
            request={
                "command": ["sbatch", "--parsable"],
                "script": batch_script.render_script(launch, self._settings, self._home),
            },
        )

    def submit(self, plan: LaunchPlan) -> None:
        """Write ``launch.json`` and submit the batch script, unless an agent has started or Slurm knows a job of the attempt.
        Raises ``LaunchError`` and ``EngineUnreachable``."""
        name = plan.ref.name
        if any(node.seen for node in attempt_files.node_states(plan.ref)):
            return
        if self._queue.jobs(since=time.monotonic()).get(name):
            return
        environ = agent_environment(self._environ, plan)
        try:
            attempt_files.write_launch(plan.ref.paths, plan.launch)
        except OSError as error:
            raise LaunchError(f"the launch file cannot be written: {error}") from error
        try:
            self._commands.run("sbatch", "--parsable", text=plan.request["script"], environ=environ)
        except Refused as error:
            raise LaunchError(f"Slurm refused the job: {error}") from None
        finally:
            self._submitted_at[name] = time.monotonic()

    def poll(self, ref: AttemptRef) -> AttemptState:
        """Return the attempt's state. Jobs that were requeued or are duplicates are killed. Raises ``EngineUnreachable``."""
        jobs = self._jobs(ref)
        alive, duplicates = any(not job.has_ended for job in jobs), job_status.duplicate_jobs(jobs)
        for job in jobs:
            if job.was_requeued or (job in duplicates and not job.has_ended):
                self._kill_job(job)
        jobs = [job for job in jobs if job not in duplicates]
        stuck = [text for job in jobs if (text := job_status.unstartable_reason(job)) is not None]
        log = attempt_files.tail(ref.paths.engine_log, 4000) if alive and jobs else ""
        gone = job_status.ended_tasks(log, ref.nodes)
        notes = gone | (dict.fromkeys(range(ref.nodes), stuck[-1]) if stuck else {})
        nodes = attempt_files.node_states(ref, gone=lambda node: not alive or node in gone, notes=notes)
        state = AttemptState(alive, nodes, next(filter(None, map(job_status.waiting_reason, jobs)), None))
        if alive:
            return replace(state, ends=_engine_ends(jobs, state))
        return self._state_after_end(ref, jobs, state)

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Send SIGTERM to the agents that run, and cancel a pending job. A job whose nodes are still being prepared gets neither.
        ``grace`` is not used."""
        for job in self._jobs(ref):
            if not job.has_ended:
                self._cancel("--state=PENDING", str(job.id))  # a pending job has no agents to signal
                self._cancel("--signal=TERM", str(job.id))

    def kill(self, ref: AttemptRef) -> list[str]:
        """Kill the attempt's jobs, and return names of those that have not ended. Raises ``EngineUnreachable``."""
        left = [job for job in self._jobs(ref) if not job.has_ended]
        if not left:  # only a new answer is proof: another process may have submitted it since the last one
            left = [job for job in self._queue.jobs(since=time.monotonic()).get(ref.name, []) if not job.has_ended]
        for job in left:
            self._kill_job(job)
        return [f"Slurm job {job.id} ({job.state})" for job in left]

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """Return the ends of the batch script's output and of the agents' logs, at most ``limit`` characters."""
        said = [attempt_files.tail(ref.paths.engine_log, limit // 2), attempt_files.agent_logs(ref, limit // 2)]
        return "\n".join(part for part in said if part)[-limit:]

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        """Kill this run directory's jobs whose attempts are not active, and return the names of these attempts. ``known``: gets
        names of attempts, and returns the names of active ones."""
        self._prune()
        found: dict[str, list[JobRecord]] = {}
        for name, jobs in self._queue.jobs(since=time.monotonic()).items():
            ours = [job for job in jobs if job.comment == self._comment and not job.has_ended]
            if ours:
                found[name] = ours
        orphans = sorted(set(found) - set(known(list(found)))) if found else []
        for name in orphans:
            for job in found[name]:
                self._kill_job(job)
        return orphans

    def _jobs(self, ref: AttemptRef) -> list[JobRecord]:
        """Return the attempt's jobs, according to squeue. If this process has submitted the attempt, the answer is newer than
        that submission."""
        since, now = self._submitted_at.get(ref.name), time.monotonic()
        if all(ref.paths.node(node).result_file.exists() for node in range(ref.nodes)):
            told = self._results_seen_at.setdefault(ref.name, now)
            if now - told < _FAST_POLL_FOR_SECONDS and not self._queue.all_known_ended(ref.name):
                since = max(since or 0.0, now - _FAST_POLL_SECONDS)
        return self._queue.jobs(since=since).get(ref.name, [])

    def _state_after_end(self, ref: AttemptRef, jobs: Sequence[JobRecord], state: AttemptState) -> AttemptState:
        """Return the state of an attempt that has no live job in Slurm. For some time the attempt may count as alive, since
        results of its agents may still appear. Raises ``EngineUnreachable`` for some time if Slurm's accounting does not
        answer."""
        began = self._ended_seen_at.setdefault(ref.name, time.monotonic())
        if len(state.results) == ref.nodes or not (state.seen or jobs):
            return replace(state, ends=_engine_ends(jobs, state))
        if not jobs:
            try:
                if ref.name not in self._accounting_jobs:
                    self._accounting_jobs[ref.name] = self._queue.accounting_records(ref.name)
            except EngineUnreachable as error:
                if time.monotonic() - began < _ACCOUNTING_PATIENCE_SECONDS:
                    raise
                return replace(state, ends=_forgotten_end(ref, f"its accounting does not answer ({error.detail})"))
            jobs = self._accounting_jobs[ref.name]
        exited = [job for job in jobs if job.state in ("COMPLETED", "FAILED") and job.exit_code in CAUSE_OF_EXIT_CODE]
        if exited and state.seen and time.monotonic() - began < self._settings.file_seconds:
            return replace(state, alive=True)  # the agents ended by themselves, so their results will appear
        return replace(state, ends=_engine_ends(jobs, state) or (_forgotten_end(ref) if not jobs else ()))

    def _kill_job(self, job: JobRecord) -> None:
        """Kill the job at once, unless this was done less than ``_CANCEL_INTERVAL_SECONDS`` ago."""
        now = time.monotonic()
        if now - self._cancelled_at.get(job.id, -_CANCEL_INTERVAL_SECONDS) < _CANCEL_INTERVAL_SECONDS:
            return
        self._cancelled_at[job.id] = now
        # the step first: Slurm kills it immediately, but cancels a job only after its KillWait
        self._cancel("--signal=KILL", f"{job.id}.0")
        self._cancel(str(job.id))

    def _prune(self) -> None:
        """Drop remembered actions and observations that are older than ``_RETENTION_SECONDS``."""
        old = time.monotonic() - _RETENTION_SECONDS
        for kept in (self._submitted_at, self._results_seen_at, self._ended_seen_at):
            for name in [name for name, at in kept.items() if at < old]:
                del kept[name]
        self._accounting_jobs = {
            name: jobs for name, jobs in self._accounting_jobs.items() if name in self._ended_seen_at
        }
        self._cancelled_at = {number: at for number, at in self._cancelled_at.items() if at >= old}

    def _cancel(self, *arguments: str) -> None:
        """Run scancel; a refusal is ignored. Raises ``EngineUnreachable``."""
        with suppress(Refused):  # it has ended meanwhile, or has not started the step yet
            self._commands.run("scancel", "--quiet", *arguments)


def _engine_ends(jobs: Sequence[JobRecord], state: AttemptState) -> tuple[EngineEnd, ...]:
    """Return the ends that Slurm reports for the jobs, in their order."""
    has_results = len(state.results) == len(state.nodes)
    found = (job_status.engine_end(job, started=state.seen, has_results=has_results) for job in jobs)
    return tuple(end for end in found if end is not None)


def _forgotten_end(ref: AttemptRef, why: str = "this cluster keeps no record of it") -> tuple[EngineEnd, ...]:
    """Return the end of an attempt whose job Slurm has forgotten, with cause ``UNKNOWN``. ``why``: the clause of the message that
    says why Slurm's accounting has no result either."""
    text = f"Slurm no longer has the job {ref.name} (MinJobAge), and {why}: its result is unknown"
    return (EngineEnd(Cause.UNKNOWN, text),)
