"""What the proof of a job changes in the service: which checkpoints are pinned during the proof, and what it forks."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from ratchet_client import RatchetClient
from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.prove.proof import prove_job
from ratchet_client.cli.prove.trials import trials
from ratchet_contract.errors import Refused
from tests.support.scripted_server import JOB, Reply, ok, problem, serving

pytestmark = pytest.mark.processes

ID = str(JOB["id"])
OLDER, NEWEST = "step-000000000001.a0001", "step-000000000002.a0001"


class Service:
    """A service with one job of two checkpoints. It pins the source of a fork, and then another job's fork of ``other`` is made,
    if that is given. The proof's own fork is refused."""

    def __init__(self, pinned: set[str], other: str | None) -> None:
        self.listed, self.pinned, self._other = set(pinned), set(pinned), other
        self.jobs = [JOB]
        self.fork: dict[str, Any] = {}

    def checkpoint(self, name: str, pinned: set[str]) -> dict[str, object]:
        return {
            "job_id": ID, "attempt": 1, "step": int(name[5:17]), "state": "committed", "size": 1, "files": 1, "digest": "d",
            "reason": "interval", "created_at": JOB["created_at"], "id": name, "pinned": name in pinned, "lineage": "current",
        }  # fmt: skip

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> Reply:
        path = request.path.partition("?")[0]
        name = next((name for name in (OLDER, NEWEST) if name in path), None)
        if path == "/v1/jobs":
            return ok({"items": self.jobs})
        if path == f"/v1/jobs/{ID}":
            return ok(JOB)
        if path.endswith("/checkpoints"):
            return ok({"items": [self.checkpoint(name, self.listed) for name in (NEWEST, OLDER)]})
        if path.endswith("/pin"):
            assert name is not None
            (self.pinned.add if json.loads(body)["pinned"] else self.pinned.discard)(name)
        if name is not None:
            return ok(self.checkpoint(name, self.pinned))
        assert path.endswith("/fork")
        self.fork = json.loads(body)
        if self._other is not None:
            fork = {
                "id": "job-000000000002",
                "forked_from": f"{ID}/{self._other}",
                "created_at": "2026-01-02T00:00:00Z",
            }
            self.jobs = [JOB | fork, *self.jobs]
            self.pinned.add(self._other)
        return problem(429, "too-many-requests")

    def prove(self) -> None:
        def script(request: BaseHTTPRequestHandler, number: int) -> Reply:
            return self.answer(request, server.bodies[number - 1])

        with (
            serving(script) as server,
            RatchetClient(server.url, retry_for=0) as client,
            Progress(lines=True) as say,
            pytest.raises(Refused),
            trials(client, say) as made,
        ):
            prove_job(made, ID)


@pytest.mark.parametrize("before", [set(), {OLDER}, {NEWEST}, {OLDER, NEWEST}])
def test_proof_leaves_pins_as_they_were(before: set[str]) -> None:
    service = Service(before, None)
    service.prove()
    assert service.pinned == before


@pytest.mark.parametrize("source", [OLDER, NEWEST])
def test_proof_keeps_the_pin_of_another_fork_made_meanwhile(source: str) -> None:
    service = Service(set(), source)
    service.prove()
    assert service.pinned == {source}


@pytest.mark.parametrize("name", [OLDER, NEWEST])
def test_proof_keeps_a_pin_that_was_made_after_it_listed_the_checkpoints(name: str) -> None:
    service = Service(set(), None)
    service.pinned = {name}
    service.prove()
    assert service.pinned == {name}


def test_fork_of_a_proof_disables_experiment_trackers_and_has_no_object_store() -> None:
    service = Service(set(), None)
    service.prove()
    changes = service.fork["spec"]
    assert (changes["env"]["WANDB_MODE"], changes["env"]["COMET_MODE"]) == ("disabled", "disabled")
    assert "uri" in changes["checkpoint"] and changes["checkpoint"]["uri"] is None
