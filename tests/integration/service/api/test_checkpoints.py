"""Checkpoints over HTTP against real files: verification, pins, resume from a step, forks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import (
    Base,
    ComponentReport,
    EnvironmentDifference,
    ResumeReport,
    Segment,
)
from ratchet_contract.paths import PINNED_NAME, JobPaths
from ratchet_contract.phases import JobPhase
from ratchet_hooks.summary import HookSummary
from ratchet_service.db.models import Checkpoint, Job
from ratchet_service.usecases import checkpoints
from tests.support.api import Api, checkpoint_message, training_message
from tests.support.checkpoints import make_checkpoint, manifest_of, write_ranks
from tests.support.one_shot_writers import commit
from tests.support.retention import run_retention


@pytest.fixture
def job(api: Api) -> str:
    job_id = api.submit(labels={"team": "x"}, priority=3)
    api.attempt(job_id)
    api.report(job_id, (0, 1, [training_message()]))
    return job_id


def paths(api: Api, job_id: str) -> JobPaths:
    return api.settings.paths.job(job_id)


def told(manifest: Manifest) -> dict[str, Any]:
    return checkpoint_message(
        manifest.step, manifest.attempt, digest=manifest.digest, size=manifest.size, files=len(manifest.files),
        parent=manifest.parent.step,
    ) | {"parent": manifest.parent.model_dump()}  # fmt: skip


def saved(
    api: Api, job_id: str, *steps: int, seq: int = 2, attempt: int = 1, parent: Base | None = None
) -> list[Manifest]:
    """Checkpoints on disk, reported."""
    hook = api.job(job_id)["spec"]["hook"]
    chain: list[Manifest] = []
    for step in steps:
        base = chain[-1].base if chain else parent
        chain.append(
            make_checkpoint(paths(api, job_id).checkpoints, step, attempt, parent=base, job_id=job_id, hook=hook)
        )
    answer = api.report(job_id, (0, seq, [told(m) for m in chain]), number=attempt)
    assert answer.json()["acked"]["0"] == seq + len(steps) - 1
    return chain


def url(job_id: str, manifest: Manifest, action: str = "") -> str:
    return f"/v1/jobs/{job_id}/checkpoints/{manifest.id}{action}"


def test_get_checkpoint_includes_its_manifest(api: Api, job: str) -> None:
    _, manifest = saved(api, job, 5, 10)
    detail = api.client.get(url(job, manifest)).json()
    assert (detail["digest"], detail["attempt"], detail["parent"]["attempt"]) == (manifest.digest, 1, 1)
    shown = detail["manifest"]
    assert (shown["attempt"], shown["parent"]["attempt"], "epoch" in shown) == (1, 1, False)
    assert detail["manifest"]["files"][0]["blocks"] == manifest.files[0].blocks
    (paths(api, job).checkpoint(10, 1) / "MANIFEST.json").unlink()
    assert api.client.get(url(job, manifest)).json()["manifest"] is None


def test_checkpoints_page_newest_first(api: Api, job: str) -> None:
    api.report(job, (0, 2, [checkpoint_message(s) for s in range(1, 8)]))
    seen, cursor = [], None
    while True:
        query = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = api.client.get(f"/v1/jobs/{job}/checkpoints", params=query).json()
        seen += [c["step"] for c in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [7, 6, 5, 4, 3, 2, 1]


def test_attempts_page_newest_first(api: Api, job: str) -> None:
    for number in range(2, 6):
        api.attempt(job, number=number)
    first = api.client.get(f"/v1/jobs/{job}/attempts", params={"limit": 3}).json()
    rest = api.client.get(f"/v1/jobs/{job}/attempts", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [a["number"] for a in first["items"] + rest["items"]] == [5, 4, 3, 2, 1]
    assert rest["next_cursor"] is None


def test_attempts_are_listed_without_the_parts_that_grow_with_the_ranks(api: Api, job: str) -> None:
    report = ResumeReport(
        verdict="not-exact",
        base=Base(step=5, attempt=1, digest="d"),
        world_size=2,
        components=[ComponentReport(component="model", rank=rank, status="exact") for rank in range(2)],
        differences=[EnvironmentDifference(key="threads", recorded=2, current=1)],
        notes=["a note"],
    )
    api.attempt(job, number=2, resume_report=report.model_dump(mode="json"))

    def newest(**query: Any) -> dict[str, Any]:
        found: dict[str, Any] = api.client.get(f"/v1/jobs/{job}/attempts", params=query).json()["items"][0]
        return found | {"goodput": None}  # it grows

    whole = newest()
    assert len(whole["resume_report"]["components"]) == 2 and len(whole["nodes"]) == 1
    brief = whole | {"resume_report": whole["resume_report"] | {"components": []}, "nodes": []}
    assert newest(exclude=["components", "nodes"]) == brief
    assert newest(exclude="components") == brief | {"nodes": whole["nodes"]}
    assert newest(exclude="nodes") == whole | {"nodes": []}
    wrong = api.client.get(f"/v1/jobs/{job}/attempts", params={"exclude": "proof"})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/query/exclude/0")


def test_verify_checkpoint_reads_every_byte_and_stores_the_result(api: Api, job: str) -> None:
    good, bad = saved(api, job, 5, 10)
    answer = api.client.post(url(job, good, "/verify"))
    assert answer.status_code == 200
    result = answer.json()
    assert (result["verification"], result["error"]) == ("ok", None)
    assert result["bytes_checked"] == good.size
    file = paths(api, job).checkpoint(10, 1) / bad.files[1].name
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    damaged = api.client.post(url(job, bad, "/verify")).json()
    assert damaged["verification"] == "damaged"
    assert bad.files[1].name in damaged["error"]
    seen = {c["step"]: c for c in api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]}
    assert (seen[5]["verification"], seen[10]["verification"]) == ("ok", "damaged")
    assert seen[10]["verification_error"] == damaged["error"]
    assert seen[5]["verified_at"] is not None


def test_verify_detects_a_checkpoint_replaced_by_another_valid_one(api: Api, job: str) -> None:
    (manifest,) = saved(api, job, 5)
    directory = paths(api, job).checkpoint(5, 1)
    for file in directory.iterdir():
        file.unlink()
    make_checkpoint(paths(api, job).checkpoints, 5, 1, seed=99, job_id=job)
    assert api.client.post(url(job, manifest, "/verify")).json()["verification"] == "damaged"


def test_verify_and_pin_of_a_missing_checkpoint_are_refused(api: Api, job: str) -> None:
    vanished, deleted = saved(api, job, 5, 10)
    for file in paths(api, job).checkpoint(5, 1).iterdir():
        file.unlink()
    api.report(job, (0, 4, [{"kind": "checkpoint_deleted", "rank": 0, "at": "", "step": 10, "attempt": 1}]))
    for manifest in (vanished, deleted):
        for action in ("/verify", "/pin"):
            answer = api.client.post(url(job, manifest, action))
            assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint-gone")
    assert not (paths(api, job).checkpoint(5, 1) / PINNED_NAME).exists()


def test_verify_of_a_checkpoint_deleted_before_the_result_is_recorded_is_refused(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = saved(api, job, 5, 10)
    verify_bytes = checkpoints.verify_bytes

    def delete_afterwards(*args: Any) -> Any:
        found = verify_bytes(*args)
        api.report(job, (0, 4, [{"kind": "checkpoint_deleted", "rank": 0, "at": "", "step": 5, "attempt": 1}]))
        return found

    monkeypatch.setattr(checkpoints, "verify_bytes", delete_afterwards)
    answer = api.client.post(url(job, manifest, "/verify"))
    assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint-gone")
    (deleted,) = api.client.get(f"/v1/jobs/{job}/checkpoints", params={"state": "deleted"}).json()["items"]
    assert (deleted["id"], deleted["verification"]) == (manifest.id, None)
    assert "verified" not in [e["type"] for e in api.client.get(f"/v1/jobs/{job}/events").json()["items"]]


def test_pinned_checkpoint_survives_retention_until_unpinned(api: Api, job: str) -> None:
    first, *_ = saved(api, job, 5, 10, 15, 20)
    assert api.client.post(url(job, first, "/pin")).json()["pinned"] is True
    lineage = [Segment(attempt=1, after_step=0)]
    assert run_retention(paths(api, job).checkpoints, keep_last=2, lineage=lineage) == [(10, 1)]
    assert api.client.post(url(job, first, "/verify")).json()["verification"] == "ok"
    assert api.client.post(url(job, first, "/pin"), json={"pinned": False}).json()["pinned"] is False
    assert run_retention(paths(api, job).checkpoints, keep_last=2, lineage=lineage) == [(5, 1)]


def test_hook_view_takes_the_checkpoint_iteration_from_the_manifest(api: Api, job: str) -> None:
    files, tensors = write_ranks(paths(api, job).checkpoint(5, 1))
    summary = HookSummary(
        name="powerSGD", rank=0, step=5, phase="compressing", iteration=6, compression_rate=4.0, elements_before=4,
        elements_after=1, bytes_before=16, bytes_after=4,
    )  # fmt: skip
    plain = manifest_of(5, 1, files, tensors, job_id=job, hook=api.job(job)["spec"]["hook"])
    manifest = commit(paths(api, job).checkpoint(5, 1), plain.model_copy(update={"hook_summaries": [summary]}))
    api.report(job, (0, 2, [told(manifest)]))
    view = api.client.get(f"/v1/jobs/{job}/hook").json()
    assert (view["checkpoint_id"], view["checkpoint_iteration"]) == (manifest.id, 6)


def test_resume_from_step_accepts_steps_of_the_lineage_once_stopped(api: Api, job: str) -> None:
    saved(api, job, 5, 10)
    while_running = api.client.post(f"/v1/jobs/{job}/resume", json={"from_step": 5})
    assert (while_running.status_code, while_running.json()["code"]) == (409, "from-step-needs-stop")
    api.set_phase(job, JobPhase.SUSPENDED)
    missing = api.client.post(f"/v1/jobs/{job}/resume", json={"from_step": 7})
    assert missing.status_code == 404
    assert "10, 5" in missing.json()["detail"]
    answer = api.client.post(f"/v1/jobs/{job}/resume", json={"from_step": 5})
    assert (answer.status_code, answer.json()["phase"]) == (200, "QUEUED")
    with api.database.read() as session:
        assert session.get_one(Job, job).resume_from == {"step": 5, "attempt": 1}


def test_resume_from_step_of_an_abandoned_branch_is_refused(api: Api, job: str) -> None:
    first, _ = saved(api, job, 5, 10)
    api.attempt(job, number=2)
    api.report(job, (0, 1, [training_message(5, 1) | {"base": first.base.model_dump()}]), number=2)
    saved(api, job, 8, attempt=2, parent=first.base)
    api.set_phase(job, JobPhase.FAILED)
    assert api.client.post(f"/v1/jobs/{job}/resume", json={"from_step": 10}).status_code == 404
    fork = api.client.post(f"/v1/jobs/{job}/fork").json()
    assert fork["forked_from"] == f"{job}/step-000000000008.a0002"
    assert api.client.post(f"/v1/jobs/{job}/resume", json={"from_step": 5}).status_code == 200


def test_fork_keeps_uploaded_code_unless_other_code_is_specified(api: Api) -> None:
    sent, other = {"path": "/laptop", "digest": "a" * 64}, {"path": "/laptop", "digest": "b" * 64}
    parent = api.submit(code=sent)
    api.attempt(parent)
    api.report(parent, (0, 1, [training_message()]))
    saved(api, parent, 5)
    assert api.submission.snapshots == []
    changes = ({"seed": 1}, {"code": other}, {"code": {"path": "/here"}})
    forks = [api.client.post(f"/v1/jobs/{parent}/fork", json={"spec": change}).json() for change in changes]
    assert [fork["spec"]["code"]["digest"] for fork in forks] == ["a" * 64, "b" * 64, None]
    assert [fork["resolved"]["code_digest"] for fork in forks][:2] == ["a" * 64, "b" * 64]
    assert [str(path) for path in api.submission.snapshots] == ["/here"]


def test_a_fork_is_a_new_job_with_a_changed_spec(api: Api, job: str) -> None:
    saved(api, job, 5)
    (newest,) = saved(api, job, 10, seq=3)
    api.client.patch(f"/v1/jobs/{job}", json={"labels": {"team": "y"}})
    body = {"spec": {"task": {"args": {"epochs": 3}}, "policy": {"max_failures": 1}}}
    answer = api.client.post(f"/v1/jobs/{job}/fork", json=body)
    assert answer.status_code == 201, answer.text
    fork = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{fork['id']}"
    assert (fork["phase"], fork["name"], fork["attempt"]) == ("QUEUED", "digits-fork", 0)
    assert fork["forked_from"] == f"{job}/{newest.id}"
    assert fork["spec"]["task"] == {"entrypoint": "pkg.module:Task", "args": {"epochs": 3}}
    assert (fork["labels"], fork["priority"], fork["budgets"]["max_failures"]) == ({"team": "y"}, 3, 1)
    assert fork["progress"]["step"] == 10
    assert fork["last_checkpoint"] is None
    with api.database.read() as session:
        source = session.get_one(Job, fork["id"]).fork_source
    root = str(paths(api, job).root)
    assert source == {"job_root": root, "step": 10, "attempt": 1, "digest": newest.digest, "adopted": None}
    assert api.client.get(url(job, newest)).json()["pinned"] is True


def test_fork_to_another_launcher_drops_the_parents_launcher_keys(api: Api, job: str) -> None:
    """From laptop to cluster, and from one engine to another."""
    saved(api, job, 5)
    with api.database.write() as session:
        row = session.get_one(Job, job)
        row.spec = row.spec | {"launcher": {"kind": "kubernetes", "namespace": "a", "queue": "b"}}

    def fork(launcher: dict[str, Any]) -> dict[str, Any]:
        answer = api.client.post(f"/v1/jobs/{job}/fork", json={"spec": {"launcher": launcher}})
        assert answer.status_code == 201, answer.text
        return dict(answer.json()["spec"]["launcher"])

    assert fork({"kind": "slurm", "partition": "gpu"}).items() >= {"kind": "slurm", "partition": "gpu"}.items()
    same = fork({"kind": "kubernetes", "queue": "c"})
    assert (same["namespace"], same["queue"]) == ("a", "c"), "of the same kind: the others stay"
    assert fork({"queue": None}) == {"kind": "kubernetes", "namespace": "a"}


def test_fork_uses_the_parents_snapshot_unless_code_is_specified(api: Api) -> None:
    parent = api.submit(code={"path": "/project"})
    api.attempt(parent)
    api.report(parent, (0, 1, [training_message()]))
    saved(api, parent, 5)
    taken = len(api.submission.snapshots)
    for change, more in (({}, 0), ({"code": {"path": "/project"}}, 1), ({"code": {"path": "/other"}}, 2)):
        answer = api.client.post(f"/v1/jobs/{parent}/fork", json={"spec": change})
        assert answer.status_code == 201, answer.text
        assert len(api.submission.snapshots) == taken + more


def test_fork_source_cannot_be_deleted_before_the_forks_first_checkpoint(api: Api, job: str) -> None:
    (manifest,) = saved(api, job, 5)
    fork = api.client.post(f"/v1/jobs/{job}/fork", json={"checkpoint_id": manifest.id, "name": "other"}).json()["id"]
    api.set_phase(job, JobPhase.SUCCEEDED)
    for answer in (
        api.client.delete(f"/v1/jobs/{job}"),
        api.client.post(url(job, manifest, "/pin"), json={"pinned": False}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint-in-use")
    api.attempt(fork)
    start = training_message(5, 1) | {"base": manifest.base.model_dump()}
    api.report(fork, (0, 1, [start]))
    assert api.job(fork)["last_checkpoint"] is None
    assert api.client.delete(f"/v1/jobs/{job}").status_code == 409
    api.report(fork, (0, 2, [checkpoint_message(9)]))
    assert api.job(fork)["last_checkpoint"] == "step-000000000009.a0001"
    assert api.client.delete(f"/v1/jobs/{job}").status_code == 200


WRONG_FORKS: list[tuple[dict[str, Any], str, str]] = [
    ({"world": {"ranks_per_node": 3}}, "/spec/world/ranks_per_node", "world-size-mismatch"),
    ({"hook": "allreduce"}, "/spec/hook", "hook-mismatch"),
    ({"hook": "allreduce", "policy": {"on_hook_mismatch": "redistribute"}}, "/spec/hook", "hook-mismatch"),
    ({"hook": {"matrix_approximation_rank": 7}}, "/spec/hook", "hook-mismatch"),
    ({"start_from": {"path": "/model.safetensors"}}, "/spec/start_from", "fork-start"),
    ({"tsak": {}}, "/spec/tsak", "unknown-key"),
    ({"world": {"device": "cuda"}}, "/spec/world/device", "no-gpu"),
]


@pytest.mark.parametrize(("change", "pointer", "code"), WRONG_FORKS)
def test_fork_with_an_unstartable_spec_is_refused(
    api: Api, job: str, change: dict[str, Any], pointer: str, code: str
) -> None:
    saved(api, job, 5)
    answer = api.client.post(f"/v1/jobs/{job}/fork", json={"spec": change})
    assert answer.status_code == 422
    error = answer.json()["errors"][0]
    assert (error["pointer"], error["code"]) == (pointer, code)
    assert len(api.client.get("/v1/jobs").json()["items"]) == 1


def test_fork_of_a_finished_checkpoint_with_no_steps_left_is_refused(api: Api) -> None:
    def ended(total: int | None) -> str:
        job_id = api.submit(code={"path": "/project"}, task={"entrypoint": "mine:Task", "args": {"steps": 10}})
        api.attempt(job_id)
        api.report(job_id, (0, 1, [training_message()]))
        saved(api, job_id, 5)
        (last,) = saved(api, job_id, 10, seq=3)
        with api.database.write() as session:
            session.get_one(Checkpoint, (job_id, last.step, last.attempt)).finished = True
        api.set_phase(job_id, JobPhase.SUCCEEDED, total_steps=total)
        return job_id

    def fork(job_id: str, **body: Any) -> httpx.Response:
        return api.client.post(f"/v1/jobs/{job_id}/fork", json=body)

    job_id = ended(10)
    for change in ({}, {"seed": 7, "hook": {"start_powerSGD_iter": 20}}, {"policy": {"max_failures": 9}}):
        refused = fork(job_id, spec={**change, "policy": {"on_hook_mismatch": "reset", **change.get("policy", {})}})
        assert (refused.status_code, refused.json()["code"]) == (409, "nothing-left"), refused.text
        assert "all 10 steps" in refused.json()["detail"]
        assert f"`ratchet fork {job_id} --checkpoint step-000000000005.a0001`" in refused.json()["detail"]
    for change in ({"task": {"args": {"steps": 20}}}, {"code": {"path": "/other"}}, {"env": {"STEPS": "20"}}):
        assert fork(job_id, spec=change).status_code == 201
    assert fork(job_id, checkpoint_id="step-000000000005.a0001").status_code == 201
    assert fork(ended(None)).status_code == 201, "only its script knows its steps"
    assert fork(ended(12)).status_code == 201, "it ended before its last step"


def test_fork_with_an_invalid_name_is_refused_with_its_pointer(api: Api, job: str) -> None:
    saved(api, job, 5)
    for body, pointer in (({"name": "A B"}, "/name"), ({"spec": {"name": "A B"}}, "/spec/name")):
        answer = api.client.post(f"/v1/jobs/{job}/fork", json=body)
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


def test_fork_with_another_hook_and_mismatch_policy_reset_is_accepted(api: Api, job: str) -> None:
    saved(api, job, 5)
    change = {"hook": "allreduce", "policy": {"on_hook_mismatch": "reset"}}
    answer = api.client.post(f"/v1/jobs/{job}/fork", json={"spec": change})
    assert answer.status_code == 201, answer.text
    assert answer.json()["hook"] == "allreduce"
