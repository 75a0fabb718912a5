"""An app over a test database with a machine that is made up, and short cuts to jobs in any phase."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import AttemptPhase, Desired, JobPhase
from ratchet_contract.protocol.messages import AgentReport
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.api.server import MAX_HEADERS, HeadDeadline
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db.api_tokens import hash_token
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Attempt, AttemptNode, Job
from ratchet_service.launchers.registry import load
from ratchet_service.preflight.resolve import resize
from ratchet_service.scheduling.machine import Machine
from ratchet_service.scheduling.slots import Capacity

TOKEN = "the-token-of-the-attempt"
SPEC: dict[str, Any] = {
    "name": "digits",
    "task": {"entrypoint": "pkg.module:Task", "args": {}},
    "world": {"ranks_per_node": 2, "device": "cpu"},
    "hook": {"name": "powerSGD", "start_powerSGD_iter": 10},
}


def spec(**changes: Any) -> dict[str, Any]:
    return SPEC | changes


@dataclass
class FakeSubmission:
    """A machine with two cores and no GPU; counts what it is asked for."""

    snapshots: list[Path] = field(default_factory=list)
    wakes: int = 0
    machine: Machine = field(default_factory=lambda: Machine((), 4))
    home: HomePaths = field(default_factory=lambda: HomePaths(Path("/nowhere")))

    def with_requirements(self, spec: JobSpec, code_digest: str) -> JobSpec:
        return spec

    def resolve(
        self, spec: JobSpec, code_digest: str | None = None, faulty_keys: frozenset[str] = frozenset()
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        problems = []
        if spec.world.device == "cuda":
            problems = [FieldProblem(pointer="/world/device", code="no-gpu", detail="this machine has no GPU")]
        warnings = [Warning_(pointer="/nccl", code="without-effect", detail="the backend is gloo")] if spec.nccl else []
        return Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="/usr/bin/python3"), warnings, problems

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        return resize(spec, resolved, warnings, self.machine, load(self.home, None))

    def check_hook_change(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        return [], []

    def trains_here(self, kind: str) -> bool:
        return kind == "local"

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        self.snapshots.append(path)
        return hashlib.sha256(str(path).encode()).hexdigest()

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        return None

    def keep_uploaded(self, digest: str) -> str:
        return digest

    def snapshot_file(self, path: Path) -> str:
        return self.snapshot(path)

    def allows_path(self, real: Path) -> bool:
        return True

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        return {"agent": {"command": ["agent"]}, "ranks": [{"RANK": str(r)} for r in range(spec.world.size)]}

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        return None

    def capacity(self) -> Capacity | None:
        return self.machine.capacity

    def wake(self) -> None:
        self.wakes += 1


@dataclass
class Api:
    """A client and what lies behind it."""

    client: httpx.Client
    database: Database
    settings: Settings
    submission: FakeSubmission

    def submit(self, **changes: Any) -> str:
        answer = self.client.post("/v1/jobs", json=spec(**changes))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """But for its goodput and its place in the queue, which are told only where a job is read."""
        answer = self.client.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found | {"goodput": None, "position": None}

    def set_phase(self, job_id: str, phase: JobPhase, desired: Desired = Desired.RUN, **columns: Any) -> None:
        """Set a phase as the past might have left it."""
        with self.database.write() as session:
            job = session.get_one(Job, job_id)
            job.phase, job.desired = phase, desired
            job.ended_at = utc_now() if phase.terminal else None
            for key, value in columns.items():
                setattr(job, key, value)

    def attempt(self, job_id: str, number: int = 1, phase: AttemptPhase = AttemptPhase.RUNNING, **columns: Any) -> None:
        """An attempt with one node, and the job running it."""
        with self.database.write() as session:
            job = session.get_one(Job, job_id)
            job.attempt, job.phase = number, JobPhase.STARTING
            row = Attempt(job_id=job_id, number=number, phase=phase, report_token_hash=hash_token(TOKEN))
            row.created_at = utc_now()
            for key, value in columns.items():
                setattr(row, key, value)
            session.add(row)
            session.flush()
            session.add(AttemptNode(job_id=job_id, attempt=number, node=0, gpus=[], cpu_slots=[0, 1], phase=phase))

    def report(self, job_id: str, *batches: Any, number: int = 1, token: str | None = TOKEN, **fields: Any) -> Any:
        """``batches`` are ``(rank, from_seq, [messages as dicts])``."""
        body = {
            "job_id": job_id,
            "attempt": number,
            "phase": "RUNNING",
            "batches": [{"rank": r, "from_seq": s, "messages": m} for r, s, m in batches],
        } | fields
        AgentReport.model_validate(body)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return self.client.post(f"/v1/jobs/{job_id}/attempts/{number}/reports", json=body, headers=headers)


def message(kind: str, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "at": "2030-01-01T00:00:00Z"} | fields


def checkpoint_message(step: int, attempt: int = 1, parent: int = 0, **fields: Any) -> dict[str, Any]:
    base = {"step": parent, "attempt": attempt if parent else None, "digest": f"d{parent}" if parent else None}
    facts = {"step": step, "attempt": attempt, "digest": f"d{step}", "size": 1000, "files": 2, "seconds": 0.1}
    return message("checkpoint", reason="schedule", parent=base, **(facts | fields))


def training_message(base: int = 0, attempt: int | None = None, **fields: Any) -> dict[str, Any]:
    return message(
        "training", base={"step": base, "attempt": attempt, "digest": f"d{base}" if base else None}, **fields
    )


class Server:
    """A real HTTP server in a thread, on a port of its own."""

    def __init__(self, app: FastAPI) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                "127.0.0.1",
                0,
                log_level="critical",
                timeout_graceful_shutdown=1,
                ws="none",
                http=HeadDeadline,
                h11_max_incomplete_event_size=MAX_HEADERS,
            )
        )
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> str:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not end within 30 s of its stop request"


@pytest.fixture(scope="session")
def api_server(migrated_database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One server per database for all tests; jobs' ids, and so their files, never repeat."""
    settings = Settings(
        home=tmp_path_factory.mktemp("home"),
        follow_interval=0.02,
        keep_alive_interval=0.1,
        request_rate=1e6,
        refused_rate=1e6,
        report_rate=1e6,
    )
    submission = FakeSubmission()
    with (
        Server(create_app(settings, submission, migrated_database)) as url,
        httpx.Client(base_url=url, timeout=30, verify=False) as client,
    ):
        yield Api(client, migrated_database, settings, submission)


@pytest.fixture
def api(database: Database, api_server: Api) -> Api:
    """The server over an empty database."""
    api_server.submission.snapshots.clear()
    return api_server
