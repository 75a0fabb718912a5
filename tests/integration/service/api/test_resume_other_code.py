"""A resume with other code over HTTP: checked as at submission, snapshotted, kept, told; refused where it can have no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.api.requests import ResumeRequest
from ratchet_contract.errors import Conflict, FieldProblem
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.db.models import Job
from ratchet_service.usecases import job_actions
from tests.support.api import Api
from tests.support.suspended_jobs import events, resume, suspend_after_checkpoint

CODE = {"code": {"path": "/home/me/project"}}
OTHER = {"code": {"path": "/home/me/mended"}}
SENT = {"code": {"path": "/home/me/project", "digest": "ab" * 32}}


def digest(api: Api, job_id: str) -> str:
    return str(api.job(job_id)["resolved"]["code_digest"])


def test_resume_with_other_code_records_both_digests_in_an_event(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.submit(**CODE)
    suspend_after_checkpoint(api, job_id, 5)
    before, old = api.job(job_id), digest(api, job_id)
    with monkeypatch.context() as patch:
        problem = FieldProblem(pointer="/task/entrypoint", code="import-failed", detail="no module named 'mine'")
        resolved = Resolved.model_validate(before["resolved"])
        patch.setattr(api.submission, "resolve", lambda *_: (resolved, [], [problem]))
        copied = len(api.submission.snapshots)
        assert resume(api, job_id, OTHER, 422)["errors"][0]["code"] == "import-failed"
        assert api.job(job_id) == before and len(api.submission.snapshots) == copied
    job = resume(api, job_id, OTHER)
    assert job["phase"] == "QUEUED" and job["spec"]["code"]["path"] == "/home/me/mended" and digest(api, job_id) != old
    assert {**job["resolved"], "code_digest": old} == before["resolved"]
    told = next(e for e in events(api, job_id) if e["type"] == "code-changed")
    assert told["data"]["code_digest"] == {"old": old, "new": digest(api, job_id)} and old in told["message"]
    with api.database.read() as session:
        assert session.get_one(Job, job_id).spec_digest == JobSpec.model_validate(job["spec"]).digest()


def test_resume_with_other_code_keeps_or_replaces_include(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.submit(code={"path": "/home/me/project", "include": ["data"]})
    asked: list[list[str]] = []
    monkeypatch.setattr(
        api.submission, "snapshot", lambda path, include: asked.append(list(include)) or f"{len(asked)}" * 64
    )
    for body, wanted in (({}, ["data"]), ({"include": ["other"]}, ["other"]), ({"include": []}, [])):
        api.client.post(f"/v1/jobs/{job_id}/cancel")
        assert resume(api, job_id, {"code": OTHER["code"] | body})["spec"]["code"]["include"] == wanted == asked[-1]


def test_resume_with_identical_code_changes_nothing(api: Api) -> None:
    """Also where it was sent under a digest: the spec stays, so that the resume is exact."""
    job_id = api.submit(**CODE)
    suspend_after_checkpoint(api, job_id, 5)
    before = api.job(job_id)
    job = resume(api, job_id, {"code": {"path": "/a/copy", "digest": digest(api, job_id)}})
    assert job["spec"] == before["spec"] and job["resolved"] == before["resolved"] and job["phase"] == "QUEUED"
    assert not [e for e in events(api, job_id) if e["type"] == "code-changed"]


def test_resume_with_changed_files_in_the_same_directory_updates_the_digest(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the spec changes: the digest alone."""
    job_id = api.submit(**CODE)
    suspend_after_checkpoint(api, job_id, 5)
    before = api.job(job_id)
    monkeypatch.setattr(api.submission, "snapshot", lambda path, include: "cd" * 32)
    job = resume(api, job_id, CODE)
    assert job["spec"] == before["spec"] and job["resolved"]["code_digest"] == "cd" * 32
    sent = resume(api, job_id, SENT | {"hook": "allreduce", "on_hook_mismatch": "reset"})
    assert sent["resolved"]["code_digest"] == "ab" * 32 and sent["hook"] == "allreduce"


@pytest.mark.parametrize(
    ("given", "why"),
    [({}, "without code of its own"), ({"code": {"path": "/opt/mine", "source": "nodes"}}, "change it there")],
)
def test_resume_with_code_of_a_job_without_a_snapshot_is_refused(api: Api, given: dict[str, Any], why: str) -> None:
    job_id = api.submit(**given)
    suspend_after_checkpoint(api, job_id, 5)
    before = api.job(job_id)
    for body in (OTHER, SENT):
        refused = resume(api, job_id, body, 422)
        assert refused["errors"][0]["code"] == "no-snapshot" and why in refused["detail"]
    assert api.job(job_id) == before


def test_resume_with_code_of_a_running_job_is_refused(api: Api) -> None:
    job_id = api.submit(**CODE)
    api.set_phase(job_id, JobPhase.RUNNING)
    refused = resume(api, job_id, OTHER, 409)
    assert refused["code"] == "code-needs-stop" and "suspend it first" in refused["detail"]
    assert resume(api, job_id, {"code": {"path": ""}}, 422)["errors"][0]["pointer"] == "/code/path"
    prepared = job_actions.prepare_resume(api.database, job_id, ResumeRequest.model_validate(OTHER), api.submission)
    api.set_phase(
        job_id, JobPhase.SUSPENDED
    )  # meanwhile: what was not looked at is not run, nor the old code in its place
    with api.database.write() as session, pytest.raises(Conflict) as refused_:
        job_actions.resume(session, job_id, prepared, api.submission, api.settings.paths)
    assert refused_.value.code == "changed-meanwhile"


def test_resume_with_other_code_after_a_checkpoint_is_refused_under_strict(api: Api) -> None:
    job_id = api.submit(determinism="strict", **CODE)
    assert resume(api, job_id, OTHER)["phase"] == "QUEUED"  # no step has been done
    made_by = digest(api, job_id)
    suspend_after_checkpoint(api, job_id, 5, code_digest=made_by)
    refused = resume(api, job_id, CODE, 409)
    assert (
        refused["code"] == "code-mismatch" and made_by in refused["detail"] and "determinism: warn" in refused["detail"]
    )
    assert digest(api, job_id) == made_by
    fork = api.client.post(f"/v1/jobs/{job_id}/fork", json={"spec": CODE})
    assert fork.status_code == 422 and fork.json()["errors"][0]["code"] == "code-mismatch"
    assert api.client.post(f"/v1/jobs/{job_id}/fork", json={"spec": CODE | {"determinism": "warn"}}).status_code == 201


def test_strict_fork_gets_other_code_by_the_advised_fork_with_warn(api: Api) -> None:
    source = api.submit(determinism="strict", **CODE)
    suspend_after_checkpoint(api, source, 5, code_digest=digest(api, source))
    fork = api.client.post(f"/v1/jobs/{source}/fork", json={}).json()["id"]
    refused = resume(api, fork, OTHER, 409)
    assert refused["code"] == "code-mismatch" and "fork the job with determinism: warn" in refused["detail"]
    again = api.client.post(f"/v1/jobs/{fork}/fork", json={"spec": OTHER | {"determinism": "warn"}})
    assert again.status_code == 201, again.text
    assert again.json()["forked_from"] == api.job(fork)["forked_from"] and again.json()["progress"]["step"] == 5


def test_fork_without_a_checkpoint_is_refused_with_working_advice(api: Api, tmp_path: Path) -> None:
    job_id = api.submit(**CODE)
    answer = api.client.post(f"/v1/jobs/{job_id}/fork", json={"spec": OTHER})
    assert answer.status_code == 404 and f"`ratchet resume {job_id} --code DIR`" in answer.json()["detail"]
    without = api.client.post(f"/v1/jobs/{api.submit()}/fork", json={"spec": OTHER})
    assert "nothing to fork from. A job with another spec is submitted" in without.json()["detail"]
