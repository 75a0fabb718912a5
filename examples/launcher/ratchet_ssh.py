"""A launcher of one's own: one other machine, where the agent is started by ssh and jobs run one after another.

The machine sees the run directory at the service's path (NFS), reaches the service (``ratchet serve --url``), and finds a
``python`` with ratchet-train[worker] on its PATH, unless the spec names another. Whatever was started there is known by
RATCHET_ATTEMPT_DIR in its environment, as ``/proc`` has it: every process of an attempt inherits it.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet_contract import env_vars as names
from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.messages import AgentFile, LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
    attempt_name,
)
from ratchet_service.launchers.planning import rank_commands


class Settings(BaseModel):
    """Under ``ssh:`` of the launchers file."""

    model_config = ConfigDict(extra="forbid")

    remote: list[str] = Field(
        min_length=1, description="Runs a shell line there, like [ssh, -oBatchMode=yes, gpu-box]."
    )
    seconds: float = Field(20.0, gt=0, description="Time limit of a command.")


def make(home: HomePaths, settings: Mapping[str, Any]) -> SshLauncher:
    """What the entry point names. Raises ``ValueError`` with a sentence that names the key."""
    try:
        return SshLauncher(home, Settings.model_validate(dict(settings)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"launchers file, ssh: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class SshLauncher:
    kind = "ssh"
    max_nodes: int | None = 1
    slots = False  # the machine's own queue is a lock file
    same_files = False  # nothing is looked up on the service's machine
    excludes_nodes = False  # there is one machine

    def __init__(self, home: HomePaths, settings: Settings) -> None:
        self._home = home
        self._settings = settings

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        given = {
            "/image": spec.image,
            "/volumes": spec.volumes,
            "/secrets": spec.secrets,
            "/resources/memory": spec.resources.memory,
            "/launcher/options": getattr(spec.launcher, "options", None),
        }
        text = "the launcher ssh knows nothing of it: remove it"
        problems = [
            FieldProblem(pointer=key, code="launcher-cannot", detail=text) for key, value in given.items() if value
        ]
        return [], problems

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        paths = AttemptPaths(Path(launch.attempt_dir))
        argv = (launch.resolved.python, "-P", "-m", "ratchet_worker.agent", str(paths.launch_file))
        env = {names.ATTEMPT_DIR: launch.attempt_dir}
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.attempt, paths),
            launch=launch,
            argv=argv,
            env=env,
            ranks=rank_commands(launch, argv[0]),
            request={"shell line": self._start(paths, argv)},
        )

    def submit(self, plan: LaunchPlan) -> None:
        if plan.ref.paths.agent_file.exists() or self._processes(plan.ref.paths):
            return
        try:
            attempt_files.write_launch(plan.ref.paths, plan.launch)
        except OSError as error:
            raise LaunchError(f"the launch file could not be written: {error}") from error
        self._run(plan.request["shell line"])

    def poll(self, ref: AttemptRef) -> AttemptState:
        alive = bool(self._processes(ref.paths))
        nodes = attempt_files.node_states(ref, gone=lambda _node: not alive)
        queued = alive and not nodes[0].seen
        return AttemptState(alive, nodes, waiting="waits for the machine: another job runs there" if queued else None)

    def stop(self, ref: AttemptRef, grace: float) -> None:
        agent = attempt_files.read_message(ref.paths.agent_file, AgentFile)
        found = self._processes(ref.paths)
        self._signal("TERM", found if agent is None else found & {str(agent.pid)})

    def kill(self, ref: AttemptRef) -> list[str]:
        found = self._processes(ref.paths)
        self._signal("KILL", found)
        return [f"process {pid} of {self._settings.remote[-1]}" for pid in sorted(found)]

    def logs(self, ref: AttemptRef, limit: int) -> str:
        return attempt_files.agent_logs(ref, limit)

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        prefix = f"{names.ATTEMPT_DIR}={self._home.jobs}/"
        told = self._run(f"grep -hzs ^{shlex.quote(prefix)} /proc/[0-9]*/environ || true").split("\0")
        there = {}
        for line in filter(None, told):
            job_id, _, number = line.removeprefix(prefix).split("/")
            there[attempt_name(job_id, int(number))] = self._home.job(job_id).attempt(int(number))
        orphans = sorted(set(there) - set(known(list(there)))) if there else []
        for name in orphans:
            self._signal("KILL", self._processes(there[name]))
        return orphans

    def _start(self, paths: AttemptPaths, argv: Sequence[str]) -> str:
        """In a session of its own, behind the lock; returns once it can be seen. flock stays beside its command, so from then on
        there is a process with the variable until the end."""
        attempt = shlex.quote(str(paths.root))
        command = ["flock", f"/tmp/ratchet-{self._home.instance_id}.lock", *argv]
        return (
            f"cd /; setsid env {names.ATTEMPT_DIR}={attempt} {shlex.join(command)} </dev/null >>{attempt}/agent.log 2>&1 & "
            f'n=0; until [ -n "$({_find(paths)})" ] || [ -e {attempt}/agent.json ] || [ $((n+=1)) -gt 100 ]; do sleep 0.1; done'
        )

    def _processes(self, paths: AttemptPaths) -> set[str]:
        return {line.split("/")[2] for line in self._run(_find(paths)).splitlines()}

    def _signal(self, name: str, pids: Collection[str]) -> None:
        if pids:
            self._run(
                f"kill -{name} {' '.join(sorted(pids))} 2>/dev/null || true"
            )  # who has ended meanwhile is no fault

    def _run(self, line: str) -> str:
        """What the shell line prints. Raises ``EngineUnreachable``: then it is tried again, and nothing is concluded."""
        where = " ".join(self._settings.remote)
        try:
            done = subprocess.run(
                [*self._settings.remote, line], capture_output=True, text=True, timeout=self._settings.seconds
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineUnreachable(f"`{where}`: {error}") from error
        if done.returncode != 0:
            raise EngineUnreachable(f"`{where}` ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout


def _find(paths: AttemptPaths) -> str:
    """Prints ``/proc/PID/environ`` of each process of the attempt."""
    wanted = shlex.quote(f"{names.ATTEMPT_DIR}={paths.root}")
    return f"grep -lzsxF {wanted} /proc/[0-9]*/environ || true"
