"""A real service process on a run directory of its own, and what tests do to it and to its jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from ratchet_contract.api.roles import LOCAL_OWNER, Role
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import AttemptPaths, HomePaths, JobPaths, NodePaths, parse_checkpoint_dir_name
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_worker.ipc.progress_counter import CounterReader, Reading
from tests.support.fork_server import RANKS, SERVICES, Interpreter, Program
from tests.support.tokens import bearer, make_token

T = TypeVar("T")
_PERIOD, _RAREST = 0.02, 0.15


def wait_for(condition: Callable[[], T | None], what: str, deadline: float = 60.0, period: float | None = None) -> T:
    """The first truthy value of ``condition``; AssertionError naming ``what`` after ``deadline`` seconds. ``period``: seconds
    between two looks; without it they become rarer the longer it takes, so that those who look leave the cores to the work."""
    began = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited = time.monotonic() - began
        assert waited < deadline, f"waited {deadline:.0f} s for {what}"
        time.sleep(period or min(_RAREST, max(_PERIOD, waited / 10)))


def processes_below(home: Path) -> list[int]:
    """Live processes (no zombies) whose command line or environment names the run directory."""
    needle = os.fsencode(str(home))
    found = []
    for pid in procfs.pids():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes() + b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if needle in text and pid != os.getpid() and procfs.start_time(pid) is not None:
            found.append(pid)
    return found


def wait_for_checkpoint(paths: AttemptPaths, step: int) -> None:
    """Until the checkpoint that was due at ``step`` or before it is committed, or a later one."""
    launch = LaunchFile.model_validate_json(paths.launch_file.read_bytes())
    every = launch.spec.checkpoint.every_steps
    assert isinstance(every, int)
    due, job = step - step % every, JobPaths(Path(launch.job_root))

    def newest() -> int:
        ids = (parse_checkpoint_dir_name(path.parent.name) for path in job.checkpoints.glob("*/MANIFEST.json"))
        return max((one[0] for one in ids if one is not None and one[1] == launch.attempt), default=0)

    base = Base.model_validate_json(paths.base_file.read_bytes())
    wait_for(lambda: max(newest(), base.step) >= due, f"step {due} to be committed", 30, 0.002)


class Server:
    """Starts, kills and restarts ``python -m ratchet_service serve`` and talks to it as any client would. ``services``,
    ``agents``: what forks it, and its local agents; ``afresh``: all of it in interpreters of their own, and not as
    ``interpreters`` has them, the service by the command ``prefix``. ``variables``: beside those of this process."""

    def __init__(
        self,
        home: Path,
        *options: str,
        cpu_slots: int = 64,
        afresh: bool = False,
        services: Interpreter = SERVICES,
        agents: Interpreter = RANKS,
        prefix: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self.paths = HomePaths(home)
        self.options = ("--cpu-slots", str(cpu_slots), *options)
        self.process: subprocess.Popen[bytes] | Program | None = None
        self._afresh, self._services, self._agents, self._prefix = afresh, services, agents, prefix
        self._variables = variables or {}
        self._starts = 0
        self.token: str | None = None
        # One for all requests, each on a connection of its own. httpx.request makes a client per request, which reads the
        # certificates each time: 20 ms of a core, ten times a second, in every test that waits for a job.
        self._client = httpx.Client(
            timeout=30, verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def use_admin_token(self) -> None:
        """From now on, an admin's: for a service that wants one. There is a database by then."""
        database = Database(sqlite_url(self.paths.database))
        self.token = make_token(database, LOCAL_OWNER, Role.ADMIN)
        self._client.headers.update(bearer(self.token))
        database.dispose()

    def start(self) -> Server:
        self.home.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        with (self.home / f"service-{self._starts}.log").open("wb") as log:
            command = [*self._prefix, sys.executable, "-m", "ratchet_service", "serve", "--home", str(self.home)]
            command += ["--port", "0", *self.options]
            env = os.environ | self._variables
            if self._afresh:
                self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            else:
                local = "--no-reconciler" not in self.options
                self.process = self._services.start(
                    command, log.fileno(), env=env, agents=self._agents.address if local else None
                )
                if local:
                    self._agents.wait_ready()  # a launcher is not to wait for it
        wait_for(self._ready, "the service to be ready", 60)
        return self

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the service ended at start:\n{self.log()}"
        try:
            described = json.loads(self.paths.service_file.read_text())
            return (
                described["pid"] == self.process.pid
                and self._client.get(f"{described['url']}/readyz").status_code == 200
            )
        except (OSError, ValueError, httpx.HTTPError):
            return False

    def log(self) -> str:
        return "\n".join(p.read_text() for p in sorted(self.home.glob("service-*.log")))

    def kill(self) -> None:
        """SIGKILL: agents and ranks go on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """End the service, then every agent and rank; nothing of the run directory is left alive."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for pid in processes_below(self.home):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_below(self.home), "killed processes to end", 10)

    @property
    def url(self) -> str:
        return str(json.loads(self.paths.service_file.read_text())["url"])

    def call(self, method: str, path: str, *, expect: int | None = None, **more: Any) -> httpx.Response:
        """One request, tried again while the service restarts; a status other than ``expect`` (default 2xx) fails."""

        def once() -> httpx.Response | None:
            try:
                return self._client.request(method, self.url + path, **more)
            except (httpx.TransportError, OSError, ValueError):
                return None

        answer = wait_for(once, f"an answer to {method} {path}", 30, 0.1)
        fine = answer.is_success if expect is None else answer.status_code == expect
        assert fine, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer

    def submit(self, spec: dict[str, Any]) -> str:
        return str(self.call("POST", "/v1/jobs", json=spec).json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/jobs/{job_id}").json())

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        items = self.call("GET", f"/v1/jobs/{job_id}/attempts").json()["items"]
        return sorted(items, key=lambda a: int(a["number"]))

    def events(self, job_id: str) -> list[dict[str, Any]]:
        return list(self.call("GET", f"/v1/jobs/{job_id}/events?limit=100").json()["items"])

    def wait_phase(self, job_id: str, *phases: str, deadline: float = 120) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            job = self.job(job_id)
            if job["phase"] in phases:
                return job
            ended = job["phase"] in ("SUCCEEDED", "FAILED", "CANCELLED")
            assert not ended, f"job is {job['phase']}: {job['reason']}: {job['message']}\n{self.rank_logs(job_id)}"
            return None

        try:
            return wait_for(reached, f"job {job_id} to be {' or '.join(phases)}", deadline, 0.25)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{self.job(job_id)}\n{self.rank_logs(job_id)}\n{self.log()[-4000:]}"
            ) from None

    def rank_logs(self, job_id: str) -> str:
        """The end of every rank's and agent's log, for messages."""
        root = self.paths.job(job_id).root / "attempts"
        parts = [*sorted(root.glob("*/logs/*.log")), *sorted(root.glob("*/agent.log"))]
        return "\n".join(f"--- {p.relative_to(root)}\n{p.read_text(errors='replace')[-2000:]}" for p in parts)

    def newest_attempt(self, job_id: str) -> tuple[int, AttemptPaths] | None:
        root = self.paths.job(job_id).root / "attempts"
        numbers = sorted(int(p.name) for p in root.iterdir()) if root.is_dir() else []
        return (numbers[-1], self.paths.job(job_id).attempt(numbers[-1])) if numbers else None

    def wait_step(
        self, job_id: str, step: int, *, after_attempt: int = 0, deadline: float = 90, saved: bool = False
    ) -> tuple[int, AttemptPaths]:
        """Wait until rank 0 of an attempt numbered above ``after_attempt`` has finished ``step``: read from the step counter,
        so that a test can act within milliseconds of it; looked at as often only from the first step on. ``saved``: and until
        what was due by then is committed, which goes on beside the training."""
        what = f"step {step} of an attempt after {after_attempt}"

        def seen(enough: Callable[[Reading], bool]) -> tuple[int, AttemptPaths] | None:
            newest = self.newest_attempt(job_id)
            if newest is None or newest[0] <= after_attempt:
                return None
            reading = CounterReader(newest[1].counter(0)).read()
            return newest if reading is not None and enough(reading) else None

        try:
            wait_for(lambda: seen(lambda reading: reading.started > 0), what, deadline)
            found = wait_for(lambda: seen(lambda reading: reading.finished >= step), what, deadline, 0.002)
            if saved:
                wait_for_checkpoint(found[1], step)
            return found
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{self.job(job_id)}\n{self.rank_logs(job_id)}\n{self.log()[-4000:]}"
            ) from None


def agent_pid(paths: NodePaths) -> int:
    return int(json.loads(paths.agent_file.read_text())["pid"])


def rank_pid(paths: AttemptPaths, rank: int) -> int:
    """The pid a rank reported in its first message."""
    for line in paths.spool(rank).read_text().splitlines():
        message = json.loads(line)
        if message["kind"] == "started":
            return int(message["pid"])
    raise AssertionError(f"rank {rank} has not reported")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service of the module's own; afterwards nothing of it is alive. The module's ``AGENTS`` fork its agents, and its
    ``VARIABLES`` are the service's."""
    agents, variables = getattr(request.module, "AGENTS", RANKS), getattr(request.module, "VARIABLES", None)
    yield from _running(Server(tmp_path_factory.mktemp("service") / "home", agents=agents, variables=variables))


@pytest.fixture(scope="module")
def idle_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service without a reconciler: jobs wait, everything else is as in earnest."""
    yield from _running(Server(tmp_path_factory.mktemp("service") / "home", "--no-reconciler"))


@pytest.fixture
def token_required_server(tmp_path: Path) -> Iterator[Server]:
    """A service that wants tokens, without a reconciler, of the test's own."""
    yield from _running(Server(tmp_path / "home", "--no-reconciler", "--auth", "token"))


def _running(server: Server) -> Iterator[Server]:
    try:
        yield server.start()
    finally:
        server.stop()
