"""Another hook over HTTP: checked as at submission, with leave where its state would be lost; real checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ratchet_contract.api.requests import ResumeRequest
from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import Conflict, FieldProblem
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.db.models import Job
from ratchet_service.usecases import job_actions
from tests.support.api import Api
from tests.support.suspended_jobs import REDISTRIBUTE, events, resume, suspend_after_checkpoint


def test_resume_with_another_hook_is_validated_and_recorded_as_an_event(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.submit()
    suspend_after_checkpoint(api, job_id, 5)
    before = api.job(job_id)
    wrong: list[tuple[Any, str]] = [
        ("powerSDG", "/hook/name"),
        ({"matrix_approximation_rnak": 4}, "/hook/matrix_approximation_rnak"),
        ({"name": "fp16_compress", "wrapper": "bf16"}, "/hook/wrapper"),
        ({"name": "post_localSGD", "subgroup_size": 3}, "/hook/subgroup_size"),
        (7, "/hook"),
    ]
    for hook, pointer in wrong:
        assert resume(api, job_id, {"hook": hook}, 422)["errors"][0]["pointer"] == pointer
    assert api.job(job_id) == before

    # It is held against what was decided for the job: a machine that has changed since is no reason.
    problems = [FieldProblem(pointer="/hook/hook", code="hook-import-failed", detail="no module named 'mine'")]
    pointers = {"/hook": "single-rank", "/world/ranks_per_node": "hook-caution", "/nccl": "nccl-tuned"}
    warnings = [Warning_(pointer=pointer, code=code, detail="x") for pointer, code in pointers.items()]
    decided = []

    def rehook(_: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        decided.append(resolved.model_dump(mode="json"))
        return warnings, problems

    monkeypatch.setattr(api.submission, "check_hook_change", rehook)
    custom = {"name": "custom", "hook": "mine:hook"}
    refused = resume(api, job_id, {"hook": custom, "on_hook_mismatch": "reset"}, 422)
    assert [e["code"] for e in refused["errors"]] == ["hook-import-failed"] and decided == [before["resolved"]]
    problems.pop()

    changed = {"hook": {"matrix_approximation_rank": 4}}
    refused = resume(api, job_id, changed, 409)
    assert refused["code"] == "hook-mismatch" and "matrix_approximation_rank 1 -> 4" in refused["detail"]
    assert "residuals" in refused["detail"] and "P and Q" in refused["detail"]
    assert resume(api, job_id, {"hook": "allreduce", **REDISTRIBUTE}, 409)["code"] == "hook-mismatch"
    assert api.job(job_id) == before
    job = resume(api, job_id, changed | REDISTRIBUTE)
    assert job["spec"]["hook"] == before["spec"]["hook"] | {"matrix_approximation_rank": 4}
    assert [w["code"] for w in job["warnings"]] == ["single-rank", "hook-caution"]  # no others
    told = next(e for e in events(api, job_id) if e["type"] == "hook-changed")
    assert told["message"] == "hook.matrix_approximation_rank 1 -> 4"
    assert told["data"]["hook"] == {"old": before["spec"]["hook"], "new": job["spec"]["hook"]}
    with api.database.read() as session:
        assert session.get_one(Job, job_id).spec_digest == JobSpec.model_validate(job["spec"]).digest()

    anew = resume(api, job_id, {"hook": "allreduce", "on_hook_mismatch": "reset"})
    assert anew["spec"]["hook"] == {"name": "allreduce", "wrapper": None}
    api.set_phase(job_id, JobPhase.RUNNING)
    refused = resume(api, job_id, {"hook": "noop"}, 409)
    assert refused["code"] == "hook-needs-stop" and "suspend it first" in refused["detail"]


def test_resume_with_a_hook_prepared_in_another_phase_is_refused(api: Api) -> None:
    """An attempt that ends between the check, which it made needless, and the resume."""
    job_id = api.submit(hook="allreduce")
    api.set_phase(job_id, JobPhase.RUNNING)
    prepared = job_actions.prepare_resume(api.database, job_id, ResumeRequest(hook="powerSGD"), api.submission)
    api.set_phase(job_id, JobPhase.SUSPENDED)
    with api.database.write() as session, pytest.raises(Conflict) as refused:
        job_actions.resume(session, job_id, prepared, api.submission, api.settings.paths)
    assert refused.value.code == "changed-meanwhile" and api.job(job_id)["hook"] == "allreduce"
    assert resume(api, job_id, {"hook": "powerSGD"})["hook"] == "powerSGD"


@pytest.mark.parametrize("named", ["powerSGD", "powerSGD_hook", {"name": "powerSGD"}])
def test_resume_or_fork_naming_the_same_hook_keeps_its_parameters(api: Api, named: Any) -> None:
    hook = {"name": "powerSGD", "matrix_approximation_rank": 4, "wrapper": "bf16"}
    job_id = api.submit(hook=hook)
    suspend_after_checkpoint(api, job_id, 5)
    before = api.job(job_id)["spec"]["hook"]
    fork = api.client.post(f"/v1/jobs/{job_id}/fork", json={"spec": {"hook": named}})
    assert fork.status_code == 201 and fork.json()["spec"]["hook"] == before
    assert resume(api, job_id, {"hook": named})["spec"]["hook"] == before
    assert not [e for e in events(api, job_id) if e["type"] == "hook-changed"]
    default = {"hook": {"matrix_approximation_rank": None}}
    assert resume(api, job_id, default | REDISTRIBUTE)["spec"]["hook"] == before | {"matrix_approximation_rank": 1}


def test_resume_and_fork_import_users_code_outside_a_transaction(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.submit(hook="allreduce")
    suspend_after_checkpoint(api, job_id, 5)
    used = []

    def spied(look: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*given: Any) -> Any:
            used.append(api.database.engine.pool.checkedout())  # type: ignore[attr-defined]
            return look(*given)

        return spy

    for name in ("resolve", "check_hook_change"):
        monkeypatch.setattr(api.submission, name, spied(getattr(api.submission, name)))
    resume(api, job_id, {"hook": "powerSGD"})
    assert api.client.post(f"/v1/jobs/{job_id}/fork", json={}).status_code == 201
    assert used == [0, 0]


def test_resume_with_another_hook_without_recorded_state_needs_no_policy(api: Api) -> None:
    job_id = api.submit(hook="allreduce")
    suspend_after_checkpoint(api, job_id, 5)
    assert resume(api, job_id, {"hook": "powerSGD"})["hook"] == "powerSGD"
    strict = api.submit(hook="allreduce", determinism="strict")
    suspend_after_checkpoint(api, strict, 5)
    assert "strict" in resume(api, strict, {"hook": "powerSGD"}, 409)["detail"]
