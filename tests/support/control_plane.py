"""A control plane inside the test's process, or in one of its own that can be killed; jobs are ``trainer`` jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
import uvicorn

from ratchet_contract.api.roles import LOCAL_OWNER, Role
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import JobPhase
from ratchet_service.api.server import write_service_file
from ratchet_service.app import create_app
from ratchet_service.commands.serve import ServeOptions, serve
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Checkpoint, Event, Job
from ratchet_service.launchers.base import Launcher, LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler.loop import Reconciler
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
from tests.support.fake_trainer import AGENT
from tests.support.fork_server import ROOT, TRAINERS, Program, fork_agent
from tests.support.server import processes_below, wait_for
from tests.support.tokens import bearer, make_token


class _Forking(LocalLauncher):
    """Its agents are started without the start of an interpreter."""

    def _start(self, plan: LaunchPlan, node: int, env: dict[str, str]) -> int:
        paths = plan.ref.paths.node(node)
        paths.root.mkdir(parents=True, exist_ok=True)
        argv = plan.argv if plan.ref.nodes == 1 else (*plan.argv, "--node", str(node))
        return fork_agent(TRAINERS.address, argv, env, paths.agent_log) or super()._start(plan, node, env)


def trainer_launcher(home: HomePaths, kind: type[LocalLauncher] = LocalLauncher) -> LocalLauncher:
    forking: type[LocalLauncher] = type(kind.__name__, (_Forking,) if kind is LocalLauncher else (kind, _Forking), {})
    return forking(home, agent=AGENT, environ={**os.environ, "PYTHONPATH": ROOT})


def single_launcher(launcher: Launcher) -> Launchers:
    """``launcher`` alone, in the place of the local one or another."""
    return Launchers({launcher.kind: launcher})


def trainer_spec(plan: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A spec that passes every check; what its rank really does is ``plan`` (see ``trainer``)."""
    spec: dict[str, Any] = {
        "name": "t",
        "task": {"entrypoint": "ratchet_worker.task:TaskContext"},
        "env": {"TRAINER": json.dumps(plan or {})},
        "world": {"ranks_per_node": 1, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "policy": {"backoff": 0.05},
    }
    for key, value in more.items():
        spec[key] = {**spec.get(key, {}), **value} if isinstance(value, dict) else value
    return spec


class Plane:
    """Rows and HTTP of one control plane. ``close`` leaves no process behind."""

    def __init__(self, home: Path, database: Database, *, cpu_slots: int = 4) -> None:
        self.settings = Settings(home=home, database_url=database.url.render_as_string(hide_password=False))
        self.paths = self.settings.paths
        self.paths.jobs.mkdir(parents=True)
        self.database = database
        self.machine = Machine((), 4, cpu_slots)
        self.reconcilers: list[tuple[Reconciler, threading.Thread]] = []
        self._background: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[bytes] | Program] = []
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._starts = 0
        TRAINERS.wait_ready()  # a launcher is not to wait for it

    def serve_api(self) -> None:
        """The API in a thread, found through ``service.json`` as ever."""
        submission = LocalSubmission(self.paths, self.machine, single_launcher(trainer_launcher(self.paths)), self.wake)
        app = create_app(self.settings, submission, self.database)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        self._server, self._thread = server, thread
        wait_for(lambda: server.started, "the API to listen", 30)
        port = server.servers[0].sockets[0].getsockname()[1]
        write_service_file(self.paths.service_file, f"http://127.0.0.1:{port}")

    def start_reconciler(
        self, launcher: Launcher | None = None, timing: Timing | None = None, lease: float = 15.0
    ) -> Reconciler:
        """Another reconciler, in a thread."""
        return self.start_reconciler_with(single_launcher(launcher or trainer_launcher(self.paths)), timing, lease)

    def start_reconciler_with(
        self, launchers: Launchers, timing: Timing | None = None, lease: float = 15.0
    ) -> Reconciler:
        """Likewise, with several launchers."""
        made = Reconciler(
            self.database,
            self.paths,
            launchers,
            self.machine.capacity,
            timing=timing,
            lease_seconds=lease,
            start=self._start_in_background,
        )
        thread = threading.Thread(target=made.run)
        thread.start()
        self.reconcilers.append((made, thread))
        return made

    def _start_in_background(self, name: str, work: Callable[[], None]) -> None:
        """As ``in_thread``, but ``close`` waits for the thread: it has a connection to the test's database."""
        thread = threading.Thread(target=copy_context().run, args=(work,), name=name, daemon=True)
        self._background.append(thread)
        thread.start()

    def wake(self) -> None:
        for reconciler, _ in self.reconcilers:
            reconciler.wake()

    def start_process(self) -> subprocess.Popen[bytes] | Program:
        """API and reconciler in a process that can be killed."""
        self._starts += 1
        command = [
            sys.executable,
            "-m",
            "tests.support.control_plane",
            str(self.settings.home),
            str(self.machine.cpu_slots),
        ]
        env = {**os.environ, "PYTHONPATH": ROOT, "RATCHET_DATABASE_URL": self.settings.url}
        env[TRAINERS.variable] = TRAINERS.address
        with (self.settings.home / f"service-{self._starts}.log").open("wb") as log:
            process = TRAINERS.start(command, log.fileno(), env=env, cwd=Path(ROOT))
        self.processes.append(process)

        def ready() -> bool:
            assert process.poll() is None, self.log()
            with suppress(OSError, ValueError):
                return int(json.loads(self.paths.service_file.read_text())["pid"]) == process.pid
            return False

        wait_for(ready, "the service to listen", 60)
        return process

    def log(self) -> str:
        return "\n".join(p.read_text() for p in sorted(self.settings.home.glob("service-*.log")))

    @cached_property
    def token(self) -> str:
        """Of an admin: a service on PostgreSQL wants one."""
        return make_token(self.database, LOCAL_OWNER, Role.ADMIN)

    def post(self, path: str, body: Any = None) -> Any:
        url = json.loads(self.paths.service_file.read_text())["url"]
        answer = httpx.post(url + path, json=body, timeout=30, verify=False, headers=bearer(self.token))
        assert answer.is_success, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        url = json.loads(self.paths.service_file.read_text())["url"]
        answer = httpx.get(url + path, timeout=30, verify=False, headers=bearer(self.token))
        assert answer.is_success, answer.text
        return answer.json()

    def submit(self, plan: dict[str, Any] | None = None, **more: Any) -> str:
        return str(self.post("/v1/jobs", trainer_spec(plan, **more))["id"])

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.get_one(Job, job_id)

    def attempts(self, job_id: str) -> list[Attempt]:
        query = sa.select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number)
        with self.database.read() as session:
            return list(session.scalars(query))

    def events(self, job_id: str) -> list[Event]:
        query = sa.select(Event).where(Event.job_id == job_id).order_by(Event.id)
        with self.database.read() as session:
            return list(session.scalars(query))

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        query = sa.select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step, Checkpoint.attempt)
        with self.database.read() as session:
            return list(session.scalars(query))

    def attempt_paths(self, job_id: str, attempt: int) -> AttemptPaths:
        return self.paths.job(job_id).attempt(attempt)

    def wait(self, job_id: str, *phases: JobPhase, deadline: float = 30) -> Job:
        return self.wait_job(job_id, lambda job: job.phase in phases, " or ".join(phases), deadline)

    def wait_job(self, job_id: str, condition: Callable[[Job], bool], what: str, deadline: float = 30) -> Job:
        def reached() -> Job | None:
            job = self.job(job_id)
            return job if condition(job) else None

        try:
            return wait_for(reached, f"job to be {what}", deadline, 0.05)
        except AssertionError as error:
            job = self.job(job_id)
            story = [f"{e.attempt} {e.type}: {e.message}" for e in self.events(job_id)]
            logs = [p.read_text() for p in self.paths.job(job_id).root.glob("attempts/*/agent.log")]
            raise AssertionError(
                "\n".join([str(error), f"{job.phase} {job.reason} {job.message}", *story, *logs])
            ) from None

    def close(self) -> None:
        for reconciler, _ in self.reconcilers:
            reconciler.stop()
        for _, thread in self.reconcilers:
            thread.join(30)
        for thread in self._background:
            thread.join(30)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
        for pid in processes_below(self.settings.home):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_below(self.settings.home), "the plane's processes to go", 10)
        if self._server is not None and self._thread is not None:  # last: no agent is in the middle of a report
            self._server.should_exit = True
            self._thread.join(30)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level="INFO", stream=sys.stderr)
    tensorboard, wandb = (os.environ.get(f"RATCHET_TRACKER_{name}_DIR") for name in ("TENSORBOARD", "WANDB"))
    settings = Settings(
        home=Path(sys.argv[1]),
        database_url=os.environ["RATCHET_DATABASE_URL"],
        tensorboard_dir=None if tensorboard is None else Path(tensorboard),
        mlflow_uri=os.environ.get("RATCHET_TRACKER_MLFLOW_URI"),
        wandb_dir=None if wandb is None else Path(wandb),
    )
    serve(
        ServeOptions(settings, cpu_slots=int(sys.argv[2]), launchers=single_launcher(trainer_launcher(settings.paths)))
    )
