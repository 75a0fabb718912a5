"""How ``ratchet run`` begins: another job, or the job of the same command, whose code may have changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ratchet_client import RatchetClient
from ratchet_client.cli.run.beginning import _continue_job, begin
from ratchet_contract.api.views import JobView
from ratchet_contract.code.tree import list_entries, tree_digest
from ratchet_contract.errors import Conflict, RatchetError
from ratchet_contract.paths import HomePaths
from tests.support.scripted_server import JOB, Reply, ok, problem, serving

pytestmark = pytest.mark.processes

CHECKPOINT = {"last_checkpoint": "step-000000000001.a0001"}


class Service:
    """A service with one job, whose code has changed. ``stops``: the phases of the job after a request to suspend it, one for
    each look at it; ``refusal``: the answer to a resume with the new code, None: it is accepted; ``ends_first``:
    the request to suspend comes after the job's end."""

    def __init__(self, folder: Path, determinism: str) -> None:
        self.stops = ["STOPPING", "SUSPENDED"]
        self.refusal: Reply | None = None
        self.ends_first = False
        self.posted: list[str] = []
        code, self.home = folder / "code", HomePaths(folder / "home")
        code.mkdir()
        (code / "train.py").write_text("lr = 0.1")
        digest = tree_digest(list_entries(code))
        shutil.copytree(code, self.home.code / digest)
        (code / "train.py").write_text("lr = 0.2")
        spec = {"code": {"source": "snapshot", "path": str(code)}, "determinism": determinism}
        self.job: dict[str, Any] = JOB | {"spec": spec, "resolved": {**dict(JOB["resolved"]), "code_digest": digest}}  # type: ignore[call-overload]
        self._left: list[str] = []

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Reply:
        path = request.path.partition("?")[0]
        if path.endswith("/events"):
            return ok({"items": []})
        if request.command == "GET":
            self.job["phase"] = self._left.pop(0) if self._left else self.job["phase"]
            return ok(self.job)
        new_code = bool(json.loads(body or b"{}").get("code"))
        self.posted.append(path.rpartition("/")[2] + " with code" * new_code)
        if self.job["phase"] == "SUCCEEDED":
            return problem(409, "job-ended")
        if path.endswith("/suspend"):
            self._left = list(self.stops)
            if self.ends_first:
                return problem(409, "job-ended")
        elif new_code and self.refusal is not None:
            return self.refusal
        else:
            self.job["phase"] = "QUEUED"
        return ok(self.job)

    def go_on(self, **changes: object) -> None:
        """Continue the job, as a repeated command does; ``changes``: of the job as the command finds it."""
        self.job |= changes
        found = JobView.model_validate(self.job)
        with (
            serving(lambda request, n: self.answer(request, server.bodies[n - 1])) as server,
            RatchetClient(server.url) as client,
        ):
            _continue_job(client, self.home, found)


@pytest.mark.parametrize("old", ["RUNNING", "SUSPENDED", "SUCCEEDED"])
def test_new_job_begins_after_the_unfinished_job_of_the_command_is_cancelled(tmp_path: Path, old: str) -> None:
    known: dict[str, Any] = JOB | {"phase": old}
    made: dict[str, Any] = JOB | {"id": "job-000000000002", "phase": "QUEUED", "attempt": 0}
    asked: list[str] = []

    def answer(request: BaseHTTPRequestHandler, _number: int) -> Reply:
        path = request.path.partition("?")[0]
        if path == "/v1/jobs" and request.command == "GET":
            return ok({"items": [known]})
        if request.command == "GET":
            known["phase"] = "CANCELLED"
            return ok(known)
        asked.append("submit" if path == "/v1/jobs" else path.rpartition("/")[2])
        return ok(made if path == "/v1/jobs" else known)

    with serving(answer) as server, RatchetClient(server.url) as client:
        spec = {"name": "n", "task": {"entrypoint": "m:T"}, "world": {"ranks_per_node": 1}}
        begun = begin(client, HomePaths(tmp_path), spec, "mark", new=True, adopt=None)
    assert (begun.job.id, begun.attempt, begun.event) == (made["id"], 0, None)
    assert asked == (["submit"] if old == "SUCCEEDED" else ["cancel", "submit"])


@pytest.fixture(params=["strict"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    yield Service(tmp_path, request.param)


@pytest.mark.parametrize(
    "found",
    [
        {"phase": "RUNNING", **CHECKPOINT},
        {"phase": "RUNNING", "progress": {"step": 3}},
        {"phase": "QUEUED", **CHECKPOINT},
    ],
)
def test_strict_job_is_not_stopped_for_changed_code(service: Service, found: dict[str, Any]) -> None:
    service.refusal = problem(409, "code-mismatch")
    with pytest.raises(Conflict, match=r"train.py changed: .*its determinism is strict; .*`ratchet run --new"):
        service.go_on(**found)
    assert service.posted == [] and service.job["phase"] == found["phase"]


@pytest.mark.parametrize(
    "refusal", [problem(409, "code-mismatch"), problem(422, "invalid-spec"), problem(413, "too-many-files")]
)
def test_stopped_job_is_resumed_if_its_new_code_is_refused(
    service: Service, refusal: Reply, capsys: pytest.CaptureFixture[str]
) -> None:
    service.refusal = refusal
    with pytest.raises(RatchetError, match="told: "):
        service.go_on(phase="RUNNING")
    assert service.posted == ["suspend", "resume with code", "resume"] and service.job["phase"] == "QUEUED"
    assert "is resumed with the code that it had" in capsys.readouterr().err


@pytest.mark.parametrize("service", ["warn"], indirect=True)
def test_changed_code_is_used_after_the_job_was_stopped(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.go_on(phase="RUNNING", **CHECKPOINT)
    assert service.posted == ["suspend", "resume with code"]
    assert "with the code as it is now (train.py changed): not exact" in capsys.readouterr().err


def test_suspended_job_stays_so_if_its_new_code_is_refused(service: Service) -> None:
    service.refusal = problem(409, "code-mismatch")
    with pytest.raises(Conflict, match="`ratchet run --new"):
        service.go_on(phase="SUSPENDED", **CHECKPOINT)
    assert service.posted == ["resume with code"] and service.job["phase"] == "SUSPENDED"


@pytest.mark.parametrize("service", ["strict", "warn"], indirect=True)
@pytest.mark.parametrize("stops", [["STOPPING", "SUCCEEDED"], ["SUCCEEDED"], ["CANCELLED"], ["FAILED"]])
@pytest.mark.parametrize("before_request", [True, False])
def test_job_that_ends_while_it_is_stopped_is_reported_as_ended(
    service: Service, stops: list[str], before_request: bool
) -> None:
    service.stops, service.ends_first = stops, before_request
    with pytest.raises(
        Conflict, match=rf"{JOB['id']} ended as {stops[-1]} .*the same `ratchet run ...` starts another"
    ):
        service.go_on(phase="RUNNING")
    assert service.posted == ["suspend"]


@pytest.mark.parametrize("service", ["warn"], indirect=True)
def test_job_that_fails_while_it_is_stopped_continues_with_the_new_code(service: Service) -> None:
    service.stops = ["FAILED"]
    service.go_on(phase="RUNNING", **CHECKPOINT)
    assert service.posted == ["suspend", "resume with code"]


def test_only_strict_determinism_is_named_as_the_cause_of_a_refusal(service: Service) -> None:
    service.refusal = problem(409, "quota-exceeded")
    with pytest.raises(Conflict, match=r"^told: quota-exceeded$"):
        service.go_on(phase="FAILED", **CHECKPOINT)
