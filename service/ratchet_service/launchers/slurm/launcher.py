"""Attempts as batch jobs of Slurm: one job per attempt, named like it, with one agent per node.

Slurm restarts nothing (``--no-requeue``); where an administrator has it do so all the same, the agents refuse to run what was
run before, and the job is cancelled. An attempt is over when Slurm says so of its job. That proves it dead, except for a lost
node, where Slurm has given up asking: what still runs there is fenced. Its epoch is over, so the service refuses its reports and
tells it to end, and what it saves is on no lineage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract import environment as names
from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import Cause
from ratchet_contract.spec import JobSpec
from ratchet_service.launchers import files
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineEnd, LaunchError, LaunchPlan
from ratchet_service.launchers.planning import agent_environment, rank_commands, secret_sources
from ratchet_service.launchers.slurm import checks, script, states
from ratchet_service.launchers.slurm.commands import Commands, Refused
from ratchet_service.launchers.slurm.queue import Queue
from ratchet_service.launchers.slurm.settings import Settings, read
from ratchet_service.launchers.slurm.states import JobRecord

_SOON: Final = 0.3
"""Seconds between two questions to squeue once all agents have said their last word: the next attempt waits for the job's end."""
_SOON_FOR: Final = 10.0
_AGAIN: Final = 5.0
"""Seconds between two cancellations of a job that does not end."""
_REMEMBERED: Final = 3600.0
"""Seconds that this process keeps what it did and saw."""


def make(home: HomePaths, settings: Mapping[str, Any]) -> SlurmLauncher:
    """The factory that the table names. Raises ``ValueError`` for settings that cannot be."""
    return SlurmLauncher(home, read(settings))


class SlurmLauncher:
    """See the module. ``environ``: what batch jobs inherit from."""

    kind = "slurm"
    max_nodes: int | None = None
    slots = False
    same_files = True

    def __init__(self, home: HomePaths, settings: Settings, environ: Mapping[str, str] | None = None) -> None:
        self._home = home
        self._settings = settings
        self._environ = dict(os.environ if environ is None else environ)
        self._commands = Commands(settings.commands, settings.command_seconds, self._environ)
        self._queue = Queue(self._commands, settings.poll_seconds)
        self._mark = script.mark(home)
        self._submitted: dict[
            str, float
        ] = {}  # name -> when; younger than what squeue was asked, it is not in its answer
        self._told: dict[str, float] = {}  # name -> when all its agents' results were first seen
        self._over: dict[str, float] = {}  # name -> when it was first seen to be over
        self._past: dict[str, list[JobRecord]] = {}
        self._cancelled: dict[int, float] = {}

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        return checks.check(spec, self._settings.launcher_of(spec))

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        argv = script.agent_command(launch, self._settings)
        paths = AttemptPaths(Path(launch.attempt_dir))
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.epoch, paths, launch.spec.world.nodes),
            launch=launch,
            argv=argv,
            env={names.ATTEMPT_DIR: launch.attempt_dir},
            secrets=secret_sources(launch.spec),
            ranks=rank_commands(launch, argv[0]),
            request={"command": ["sbatch", "--parsable"], "script": script.script(launch, self._settings, self._home)},
        )

    def submit(self, plan: LaunchPlan) -> None:
        name = plan.ref.name
        if any(node.seen for node in files.node_states(plan.ref)):
            return
        if self._queue.jobs(since=time.monotonic()).get(name):
            return
        environ = agent_environment(self._environ, plan)
        try:
            files.write_launch(plan.ref.paths, plan.launch)
        except OSError as error:
            raise LaunchError(f"the launch file cannot be written: {error}") from error
        try:
            self._commands.run("sbatch", "--parsable", text=plan.request["script"], environ=environ)
        except Refused as error:
            raise LaunchError(f"Slurm refused the job: {error}") from None
        finally:
            self._submitted[name] = time.monotonic()

    def poll(self, ref: AttemptRef) -> AttemptState:
        jobs = self._jobs(ref)
        alive, idle = any(not job.over for job in jobs), states.idle(jobs)
        for job in jobs:
            if job.requeued or (job in idle and not job.over):
                self._end_job(job)
        jobs = [job for job in jobs if job not in idle]
        stuck = [text for job in jobs if (text := states.hopeless(job)) is not None]
        gone = states.ended_tasks(files.tail(ref.paths.engine_log, 4000)) if alive and jobs else {}
        notes = gone | (dict.fromkeys(range(ref.nodes), stuck[-1]) if stuck else {})
        nodes = files.node_states(ref, gone=lambda node: not alive or node in gone, notes=notes)
        state = AttemptState(alive, nodes, next(filter(None, map(states.waiting, jobs)), None))
        if alive:
            return replace(state, ends=_ends(jobs, state))
        return self._ended(ref, jobs, state)

    def stop(self, ref: AttemptRef, grace: float) -> None:
        for job in self._jobs(ref):
            if not job.over:
                self._cancel("--state=PENDING", str(job.id))  # it has no agents to ask
                self._cancel("--signal=TERM", str(job.id))

    def kill(self, ref: AttemptRef) -> list[str]:
        left = [job for job in self._jobs(ref) if not job.over]
        if not left:  # proved by an answer of now: another process may have submitted it since the last
            left = [job for job in self._queue.jobs(since=time.monotonic()).get(ref.name, []) if not job.over]
        for job in left:
            self._end_job(job)
        return [f"Slurm job {job.id} ({job.state})" for job in left]

    def logs(self, ref: AttemptRef, limit: int) -> str:
        said = [files.tail(ref.paths.engine_log, limit // 2), files.agent_logs(ref, limit // 2)]
        return "\n".join(part for part in said if part)[-limit:]

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        self._forget()
        found: dict[str, list[JobRecord]] = {}
        for name, jobs in self._queue.jobs(since=time.monotonic()).items():
            ours = [job for job in jobs if job.comment == self._mark and not job.over]
            if ours:
                found[name] = ours
        orphans = sorted(set(found) - set(known(list(found)))) if found else []
        for name in orphans:
            for job in found[name]:
                self._end_job(job)
        return orphans

    def _jobs(self, ref: AttemptRef) -> list[JobRecord]:
        since, now = self._submitted.get(ref.name), time.monotonic()
        if all(ref.paths.node(node).result_file.exists() for node in range(ref.nodes)):
            told = self._told.setdefault(ref.name, now)
            if now - told < _SOON_FOR and not self._queue.known_over(ref.name):
                since = max(since or 0.0, now - _SOON)
        return self._queue.jobs(since=since).get(ref.name, [])

    def _ended(self, ref: AttemptRef, jobs: Sequence[JobRecord], state: AttemptState) -> AttemptState:
        """What is known of an attempt that Slurm has no live job of; its files may be a little late."""
        began = self._over.setdefault(ref.name, time.monotonic())
        if len(state.results) == ref.nodes or not (state.seen or jobs):
            return replace(state, ends=_ends(jobs, state))
        if not jobs:
            if ref.name not in self._past:
                self._past[ref.name] = self._queue.past(ref.name)
            jobs = self._past[ref.name]
        said = [job for job in jobs if job.state in ("COMPLETED", "FAILED") and job.exit_code in CAUSE_OF_EXIT_CODE]
        if said and state.seen and time.monotonic() - began < self._settings.file_seconds:
            return replace(state, alive=True)  # the agents ended by themselves: they have left their results
        return replace(state, ends=_ends(jobs, state) or (_forgotten(ref) if not jobs else ()))

    def _end_job(self, job: JobRecord) -> None:
        """Now: whoever would stop has been asked to before. For a job, SIGKILL means to Slurm what a cancellation means, with a
        time (KillWait) before it; for a step it does not."""
        now = time.monotonic()
        if now - self._cancelled.get(job.id, -_AGAIN) < _AGAIN:
            return
        self._cancelled[job.id] = now
        self._cancel("--signal=KILL", f"{job.id}.0")
        self._cancel(str(job.id))

    def _forget(self) -> None:
        """What is so old that no look at an end needs it."""
        old = time.monotonic() - _REMEMBERED
        for kept in (self._submitted, self._told, self._over):
            for name in [name for name, at in kept.items() if at < old]:
                del kept[name]
        self._past = {name: jobs for name, jobs in self._past.items() if name in self._over}
        self._cancelled = {number: at for number, at in self._cancelled.items() if at >= old}

    def _cancel(self, *arguments: str) -> None:
        with suppress(Refused):  # it has ended meanwhile, or has not got so far
            self._commands.run("scancel", "--quiet", *arguments)


def _ends(jobs: Sequence[JobRecord], state: AttemptState) -> tuple[EngineEnd, ...]:
    told = len(state.results) == len(state.nodes)
    found = (states.end(job, begun=state.seen, told=told) for job in jobs)
    return tuple(end for end in found if end is not None)


def _forgotten(ref: AttemptRef) -> tuple[EngineEnd, ...]:
    text = f"Slurm has forgotten the job {ref.name} (MinJobAge), and this cluster keeps no accounting: how it ended is not known"
    return (EngineEnd(Cause.UNKNOWN, text),)
