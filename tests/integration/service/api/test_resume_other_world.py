"""Another number of ranks over HTTP: what is decided again, what stays, and every refusal, against real checkpoints on disk."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ratchet_contract.phases import JobPhase
from ratchet_contract.spec.job import JobSpec
from ratchet_service.db.engine import utc_now
from ratchet_service.db.models import Job
from ratchet_service.scheduling.machine import Machine
from tests.support.api import Api, checkpoint_message, message, training_message
from tests.support.checkpoints import make_checkpoint
from tests.support.suspended_jobs import REDISTRIBUTE, SUMMARY, events, resume, suspend_after_checkpoint, world_spec


def test_resume_with_other_rank_counts_updates_threads_and_events(api: Api) -> None:
    job_id = api.submit(resources={"cpus_per_rank": None}, ddp={"bucket_cap_mb": 1})
    suspend_after_checkpoint(api, job_id, 5)
    before, etag = api.job(job_id), api.client.get(f"/v1/jobs/{job_id}").headers["etag"]
    first = resume(api, job_id, world_spec(4, **REDISTRIBUTE))
    assert first["phase"] == "QUEUED"
    assert first["spec"]["world"] == before["spec"]["world"] | {"ranks_per_node": 4}
    assert first["spec"]["policy"] == before["spec"]["policy"] | REDISTRIBUTE
    assert first["resolved"] == before["resolved"]  # 1 thread for each of 4 ranks on 4 cores
    assert api.client.get(f"/v1/jobs/{job_id}").headers["etag"] != etag
    told = [e for e in events(api, job_id) if e["type"] in ("world-changed", "policy-changed", "resume")]
    assert [e["type"] for e in told] == ["world-changed", "policy-changed", "resume"]
    assert told[0]["data"]["ranks_per_node"] == {"old": 2, "new": 4} and "2 -> 4 ranks" in told[0]["message"]
    assert told[1]["data"]["on_hook_mismatch"] == {"old": "fail", "new": "redistribute"}

    alone = resume(api, job_id, world_spec(1))  # still queued: no attempt is alive
    assert alone["resolved"]["threads_per_rank"] == 4
    with api.database.read() as session:
        assert session.get_one(Job, job_id).spec_digest == JobSpec.model_validate(alone["spec"]).digest()
    assert {w["code"] for w in alone["warnings"]} == {"single-rank", "hook-caution"}
    assert events(api, job_id)[-2]["data"]["threads_per_rank"] == {"old": 1, "new": 4}
    back = resume(api, job_id, world_spec(2))
    assert back["resolved"]["threads_per_rank"] == 2
    assert [w["code"] for w in back["warnings"]] == ["hook-caution"]


def test_resume_with_more_nodes_on_the_local_launcher_is_refused(api: Api) -> None:
    job_id = api.submit(hook="allreduce")
    before = api.job(job_id)
    refused = resume(api, job_id, {"world": {"ranks_per_node": 1, "nodes": 2}}, 422)
    assert [(e["pointer"], e["code"]) for e in refused["errors"]] == [("/world/nodes", "too-many-nodes")]
    assert api.job(job_id) == before
    with api.database.write() as session:
        job = session.get_one(Job, job_id)
        job.spec = job.spec | {"world": job.spec["world"] | {"nodes": 2}}
    alone = resume(api, job_id, {"world": {"ranks_per_node": 2, "nodes": 1}})
    assert (alone["spec"]["world"]["nodes"], alone["spec"]["world"]["ranks_per_node"]) == (1, 2)
    assert "2 -> 1 node" in events(api, job_id)[-2]["message"]


def test_resume_with_other_ranks_changes_only_threads_of_the_resolved_facts(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have changed since: device, back end, interpreter and code do not."""
    job_id = api.submit(hook="allreduce")
    facts = {"device": "cuda", "backend": "nccl", "python": "/opt/python", "code_digest": "c" * 64}
    stored = api.job(job_id)["resolved"] | facts
    api.set_phase(
        job_id, JobPhase.SUSPENDED, resolved=stored, warnings=[{"pointer": "/nccl", "code": "no-effect", "detail": "x"}]
    )
    monkeypatch.setattr(api.submission, "machine", Machine((0, 1, 2), 12))
    job = resume(api, job_id, world_spec(3))
    assert job["resolved"] == stored | {"threads_per_rank": 4}
    assert [w["code"] for w in job["warnings"]] == ["no-effect"]
    for gpus, ranks in (((0, 1, 2), 4), ((), 1)):
        monkeypatch.setattr(api.submission, "machine", Machine(gpus, 12))
        refused = resume(api, job_id, world_spec(ranks), 422)
        assert [(e["pointer"], e["code"]) for e in refused["errors"]] == [("/world/ranks_per_node", "too-few-gpus")]
    assert api.job(job_id)["spec"] == job["spec"]
    monkeypatch.setattr(api.submission, "machine", Machine((), 4, cpu_slots=2))
    api.set_phase(job_id, JobPhase.SUSPENDED, resolved=stored | {"device": "cpu", "backend": "gloo"})
    warned = resume(api, job_id, world_spec(4))["warnings"]
    assert ("/world/ranks_per_node", "oversubscribed") in {(w["pointer"], w["code"]) for w in warned}


def test_resume_with_other_ranks_reports_the_launchers_warnings_for_them(api: Api) -> None:
    job_id = api.submit(hook="allreduce", resources={"memory": "4Gi"})
    for ranks, share in ((4, "1024 MiB"), (2, "2048 MiB")):
        (warning,) = resume(api, job_id, world_spec(ranks))["warnings"]
        assert warning["code"] == "memory-per-process" and f"the limit of {share}" in warning["detail"]


@pytest.mark.parametrize("phase", [p for p in JobPhase if p.active])
def test_resume_with_other_ranks_of_an_active_job_is_refused(api: Api, phase: JobPhase) -> None:
    job_id = api.submit()
    api.set_phase(job_id, phase)
    before = api.job(job_id)
    for body, code in (
        (world_spec(3), "world-needs-stop"),
        (REDISTRIBUTE, "policy-needs-stop"),
        (world_spec(3, from_step=5), "from-step-needs-stop"),
    ):
        refused = resume(api, job_id, body, 409)
        assert refused["code"] == code and "suspend it first" in refused["detail"]
    assert api.job(job_id) == before


def test_resume_with_the_same_rank_count_is_a_plain_resume(api: Api) -> None:
    job_id = api.submit()
    api.set_phase(job_id, JobPhase.RUNNING)
    before = api.job(job_id)
    assert resume(api, job_id, world_spec(2, on_hook_mismatch="fail")) == before
    api.set_phase(job_id, JobPhase.SUSPENDED)
    assert resume(api, job_id, world_spec(2))["phase"] == "QUEUED"
    assert "world-changed" not in {e["type"] for e in events(api, job_id)}
    api.set_phase(job_id, JobPhase.SUCCEEDED)
    refused = resume(api, job_id, world_spec(3), 409)
    assert refused["code"] == "job-ended" and f"ratchet fork {job_id}" in refused["detail"]


def test_resume_with_other_ranks_recomputes_hook_warnings(api: Api) -> None:
    local = {"name": "post_localSGD", "start_localSGD_iter": 0, "subgroup_size": 2}
    for hook, few, many, pointer, at in (
        (local, 2, 4, "/hook/subgroup_size", 2),
        ("quantization_pertensor", 2, 9, "/world/ranks_per_node", 9),
    ):
        job_id = api.submit(hook=hook)
        api.set_phase(job_id, JobPhase.SUSPENDED)
        for ranks in (many, few, many):
            told = [
                w
                for w in resume(api, job_id, world_spec(ranks))["warnings"]
                if w["pointer"] != "/hook" and w["code"] != "oversubscribed"
            ]
            assert [w["pointer"] for w in told] == ([pointer] if ranks == at else []), (hook, ranks)


def test_resume_with_other_ranks_and_per_rank_hook_state_is_refused(api: Api) -> None:
    job_id = api.submit()
    suspend_after_checkpoint(api, job_id, 5)
    before = api.job(job_id)
    refused = resume(api, job_id, world_spec(3), 409)
    assert refused["code"] == "world-size-mismatch"
    assert all(
        word in refused["detail"] for word in ("2 ranks", "powerSGD", "on_hook_mismatch", "redistribute", "reset")
    )
    assert api.job(job_id) == before and events(api, job_id)[-1]["type"] != "resume"
    assert resume(api, job_id, world_spec(3, on_hook_mismatch="reset"))["spec"]["policy"]["on_hook_mismatch"] == "reset"

    strict = api.submit(determinism="strict", hook="allreduce")
    suspend_after_checkpoint(api, strict, 5)
    refused = resume(api, strict, world_spec(3, **REDISTRIBUTE), 409)
    assert refused["code"] == "world-size-mismatch" and "strict" in refused["detail"] and "fork" in refused["detail"]


def test_resume_with_other_ranks_needs_no_policy_without_hook_state(api: Api) -> None:
    fresh = api.submit()  # there is no checkpoint yet
    api.set_phase(fresh, JobPhase.SUSPENDED)
    resume(api, fresh, world_spec(3))
    stateless = api.submit(hook="fp16_compress")
    suspend_after_checkpoint(api, stateless, 5)
    resume(api, stateless, world_spec(3))
    returned = api.submit(policy={"on_hook_mismatch": "redistribute"})
    suspend_after_checkpoint(api, returned, 5)
    resume(api, returned, world_spec(3))  # no attempt, so no checkpoint of three
    assert resume(api, returned, world_spec(2, on_hook_mismatch="fail"))["spec"]["policy"]["on_hook_mismatch"] == "fail"


def test_resume_from_step_compares_with_the_checkpoints_own_rank_count(api: Api) -> None:
    job_id = api.submit(policy={"on_hook_mismatch": "redistribute"})
    suspend_after_checkpoint(api, job_id, 5)
    resume(api, job_id, world_spec(3))
    api.attempt(job_id, 2)
    made = make_checkpoint(
        api.settings.paths.job(job_id).checkpoints,
        9,
        2,
        job_id=job_id,
        world_size=3,
        hook=api.job(job_id)["spec"]["hook"],
    )
    told = [training_message(5, 1), checkpoint_message(9, 2, parent=5, digest=made.digest)]
    assert api.report(job_id, (2, 1, []), (0, 1, told), number=2).status_code == 200
    api.set_phase(job_id, JobPhase.SUSPENDED)
    refused = resume(api, job_id, {"from_step": 5, "on_hook_mismatch": "fail"}, 409)
    assert refused["code"] == "world-size-mismatch" and "written by 2 ranks, the job asks for 3" in refused["detail"]
    job = resume(api, job_id, world_spec(2, from_step=5, on_hook_mismatch="fail"))
    assert job["spec"]["world"]["ranks_per_node"] == 2
    assert events(api, job_id)[-1]["data"]["from_step"] == 5
    assert (
        resume(api, job_id, world_spec(3), 409)["code"] == "world-size-mismatch"
    )  # step 5 is still what it will start from


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"world": {"ranks_per_node": 0}}, "/world/ranks_per_node"),
        ({"world": {"ranks_per_node": 1025}}, "/world/ranks_per_node"),
        ({"world": {"ranks_per_node": "two"}}, "/world/ranks_per_node"),
        ({"world": {}}, "/world/ranks_per_node"),
        ({"world": 3}, "/world"),
        ({"world": {"ranks_per_node": 2, "node": 2}}, "/world/node"),
        ({"world_size": 3}, "/world_size"),
        ({"on_hook_mismatch": "keep"}, "/on_hook_mismatch"),
    ],
)
def test_resume_with_an_invalid_body_is_refused_with_its_pointer(api: Api, body: dict[str, Any], pointer: str) -> None:
    job_id = api.submit()
    api.set_phase(job_id, JobPhase.SUSPENDED)
    refused = resume(api, job_id, body, 422)
    assert (refused["code"], refused["errors"][0]["pointer"]) == ("invalid-body", pointer)


def test_fork_with_other_ranks_needs_a_hook_mismatch_policy(api: Api) -> None:
    job_id = api.submit()
    suspend_after_checkpoint(api, job_id, 5)
    url, other = f"/v1/jobs/{job_id}/fork", {"world": {"ranks_per_node": 3}}
    refused = api.client.post(url, json={"spec": other}).json()
    assert [(e["pointer"], e["code"]) for e in refused["errors"]] == [
        ("/spec/world/ranks_per_node", "world-size-mismatch")
    ]
    assert "redistribute" in refused["detail"]
    answer = api.client.post(url, json={"spec": other | {"policy": REDISTRIBUTE}})
    assert (answer.status_code, answer.json()["spec"]["world"]["ranks_per_node"]) == (201, 3)
    fork = answer.json()["id"]
    api.set_phase(fork, JobPhase.SUSPENDED)
    assert (
        resume(api, fork, {"on_hook_mismatch": "fail"}, 409)["code"] == "world-size-mismatch"
    )  # it stands on the source
    resume(api, fork, world_spec(2, on_hook_mismatch="fail"))


def test_hook_view_omits_ranks_of_earlier_world_sizes(api: Api) -> None:
    job_id = api.submit(policy={"on_hook_mismatch": "redistribute"})
    api.attempt(job_id)

    def tell(number: int, ranks: int, step: int) -> None:
        facts = SUMMARY | {"step": step, "residual_norm": float(number)}
        batches = [(r, 1, [message("hook", r, summary=facts | {"rank": r})]) for r in range(ranks)]
        assert api.report(job_id, *batches, number=number).status_code == 200

    tell(1, 2, 10)
    assert api.client.get(f"/v1/jobs/{job_id}/hook").json()["residual_norm"] == {"0": 1.0, "1": 1.0}
    api.set_phase(job_id, JobPhase.SUSPENDED)
    resume(api, job_id, world_spec(1))
    api.attempt(job_id, 2)
    tell(2, 1, 5)  # from an older checkpoint, so at a smaller step
    view = api.client.get(f"/v1/jobs/{job_id}/hook").json()
    assert (view["residual_norm"], view["step"], len(view["ranks"])) == ({"0": 2.0}, 5, 1)


def test_resume_with_ranks_unsupported_by_the_hook_is_refused(api: Api) -> None:
    local = {"name": "post_localSGD", "start_localSGD_iter": 0, "subgroup_size": 2}
    job_id = api.submit(hook=local, world={"ranks_per_node": 4, "device": "cpu"})
    suspend_after_checkpoint(api, job_id, 5, ranks=4)
    refused = resume(api, job_id, world_spec(3, **REDISTRIBUTE), 422)
    assert [(e["pointer"], e["code"]) for e in refused["errors"]] == [("/hook/subgroup_size", "hook-world")]
    refused = resume(api, job_id, world_spec(2), 409)
    assert refused["code"] == "world-size-mismatch" and "state of post_localSGD" in refused["detail"]
    resume(api, job_id, world_spec(3, hook={"subgroup_size": 3}, **REDISTRIBUTE))


def test_hook_view_shows_live_state_or_that_of_the_next_start_checkpoint(api: Api) -> None:
    job_id = api.submit()
    assert api.client.get(f"/v1/jobs/{job_id}/hook").json()["source"] is None
    api.attempt(job_id)

    def summary(step: int, rank: int = 0, norm: float = 1.0) -> dict[str, Any]:
        return SUMMARY | {"rank": rank, "step": step, "iteration": step, "residual_norm": norm}

    def view() -> tuple[Any, ...]:
        found = api.client.get(f"/v1/jobs/{job_id}/hook").json()
        return found["source"], found["step"], found["iteration"], found["residual_norm"], found["checkpoint_iteration"]

    root = api.settings.paths.job(job_id).checkpoints
    made = make_checkpoint(
        root, 5, 1, job_id=job_id, hook=api.job(job_id)["spec"]["hook"], summaries=[summary(5), summary(5, 1, 2.0)]
    )
    told = [
        training_message(),
        checkpoint_message(5, digest=made.digest),
        message("hook", summary=summary(9, norm=7.0)),
    ]
    assert api.report(job_id, (0, 1, told)).status_code == 200
    assert view() == ("live", 9, 9, {"0": 7.0}, 5)
    for phase in (JobPhase.QUEUED, JobPhase.SUSPENDED, JobPhase.FAILED):
        api.set_phase(job_id, phase)
        assert view() == ("checkpoint", 5, 5, {"0": 1.0, "1": 2.0}, 5)  # steps 6 to 9 are lost
    api.attempt(job_id, 2)
    assert view() == ("checkpoint", 5, 5, {"0": 1.0, "1": 2.0}, 5)  # nothing told yet
    told = [training_message(5, 1), message("hook", summary=summary(6, norm=3.0))]
    assert api.report(job_id, (0, 1, told), number=2).status_code == 200
    assert view() == ("live", 6, 6, {"0": 3.0}, 5)
    api.set_phase(job_id, JobPhase.SUSPENDED)
    fork = api.client.post(f"/v1/jobs/{job_id}/fork", json={}).json()["id"]
    found = api.client.get(f"/v1/jobs/{fork}/hook").json()
    assert (found["source"], found["step"], found["checkpoint_id"]) == ("checkpoint", 5, None)
    resume(api, job_id, {"hook": {"matrix_approximation_rank": 4}, "on_hook_mismatch": "redistribute"})
    assert view()[0] is None  # figures of another rank
    resume(api, job_id, {"hook": "allreduce", "on_hook_mismatch": "reset"})
    assert view() == (None, None, None, {}, 5)  # of the new hook there is nothing yet


def test_resume_of_a_suspended_job_clears_the_backoff(api: Api) -> None:
    job_id = api.submit()
    later = utc_now() + timedelta(minutes=5)
    api.set_phase(job_id, JobPhase.QUEUED, not_before=later, reason="backoff", message="Tried again after 300 s.")
    assert api.job(job_id)["not_before"] is not None
    assert resume(api, job_id, {})["not_before"] is not None  # queued already: nothing changes, and the reason is told
    assert resume(api, job_id, REDISTRIBUTE)["not_before"] is None
    api.set_phase(job_id, JobPhase.QUEUED, not_before=later, reason="backoff")
    assert api.client.post(f"/v1/jobs/{job_id}/suspend").status_code == 200
    assert resume(api, job_id, {})["not_before"] is None
