"""Submitting, listing, changing and deleting jobs over HTTP."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from ratchet_contract.phases import Desired, JobPhase
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Base, Event, Job
from ratchet_service.job_files import kept_outputs
from ratchet_service.job_files.delete_job import MARKER_NAME, sweep_deleted
from ratchet_service.observability import disk_space
from ratchet_service.reconciler.ttl import Expiry
from tests.support.api import Api, spec


def pages(api: Api, **query: Any) -> list[list[str]]:
    """Ids page by page."""
    out = []
    cursor = None
    while True:
        answer = api.client.get("/v1/jobs", params=query | ({"cursor": cursor} if cursor else {}))
        assert answer.status_code == 200, answer.text
        out.append([item["id"] for item in answer.json()["items"]])
        cursor = answer.json()["next_cursor"]
        if cursor is None:
            return out


def test_submit_answers_201_with_the_resolved_job(api: Api) -> None:
    answer = api.client.post("/v1/jobs", json=spec(labels={"team": "vision"}, priority=7, nccl={"NCCL_DEBUG": "INFO"}))
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    read = api.client.get(f"/v1/jobs/{job['id']}")
    assert read.json()["position"] == 1
    assert read.json() | {"goodput": None, "position": None} == job
    assert read.headers["etag"] == answer.headers["etag"]
    assert (job["phase"], job["desired"], job["attempt"], job["priority"]) == ("QUEUED", "run", 0, 7)
    assert job["hook"] == "powerSGD"
    assert job["labels"] == {"team": "vision"}
    assert job["resolved"]["backend"] == "gloo"
    assert job["warnings"][0]["code"] == "without-effect"
    assert job["created_at"].endswith("Z")
    events = api.client.get(f"/v1/jobs/{job['id']}/events").json()["items"]
    assert [e["type"] for e in events] == ["submitted"]


def test_yaml_and_json_give_the_same_job(api: Api) -> None:
    by_json = api.client.post("/v1/jobs", json=spec()).json()
    for media_type in ("application/yaml", "text/yaml; charset=utf-8"):
        answer = api.client.post("/v1/jobs", content=yaml.safe_dump(spec()), headers={"Content-Type": media_type})
        assert answer.status_code == 201, answer.text
        assert answer.json()["spec"] == by_json["spec"]


def test_submit_snapshots_the_code_once_and_records_its_digest(api: Api, tmp_path: Path) -> None:
    job = api.job(api.submit(code={"path": str(tmp_path)}))
    assert api.submission.snapshots == [tmp_path]
    assert len(job["resolved"]["code_digest"]) == 64


def test_submit_dry_run_returns_a_plan_and_stores_nothing(api: Api, tmp_path: Path) -> None:
    body = spec(code={"path": str(tmp_path)}, nccl={"NCCL_DEBUG": "INFO"})
    answer = api.client.post("/v1/jobs", params={"dry_run": "true"}, json=body)
    assert answer.status_code == 200
    assert answer.json()["launch"]["ranks"] == [{"RANK": "0"}, {"RANK": "1"}]
    assert answer.json()["warnings"][0]["code"] == "without-effect"
    assert api.submission.snapshots == []
    assert pages(api) == [[]]


def test_submit_for_a_missing_device_is_refused_with_its_pointer(api: Api) -> None:
    for params in ({}, {"dry_run": "true"}):
        answer = api.client.post("/v1/jobs", params=params, json=spec(world={"ranks_per_node": 2, "device": "cuda"}))
        assert answer.status_code == 422
        assert answer.json()["code"] == "invalid-spec"
        assert answer.json()["errors"][0]["pointer"] == "/world/device"
    assert pages(api) == [[]]


def test_job_list_filters_combine_and_phases_are_alternatives(api: Api) -> None:
    a = api.submit(name="a", labels={"team": "x", "kind": "long"})
    b = api.submit(name="b", labels={"team": "x"})
    c = api.submit(name="c", labels={"team": "y", "kind": "long"})
    api.set_phase(b, JobPhase.RUNNING)
    assert pages(api, label="team=x", sort="created") == [[a, b]]
    assert pages(api, label=["team=x", "kind=long"]) == [[a]]
    assert pages(api, phase=["RUNNING", "SUSPENDED"]) == [[b]]
    assert pages(api, phase="QUEUED", sort="name") == [[a, c]]
    assert pages(api, name="c") == [[c]]
    assert pages(api, name="c", label="team=x") == [[]]
    assert pages(api, label="team=") == [[]]


@pytest.mark.parametrize("key", ["created", "name", "priority"])
def test_job_list_sort_is_total_in_both_directions(api: Api, key: str) -> None:
    jobs = [api.submit(name=name, priority=p) for name, p in (("b", 2), ("a", 1), ("b", 1), ("c", 2), ("a", -5))]
    up = [i for page in pages(api, sort=key, limit=2) for i in page]
    down = [i for page in pages(api, sort=f"-{key}", limit=2) for i in page]
    assert sorted(up) == sorted(jobs)
    assert down == up[::-1]
    field = {"created": "created_at"}.get(key, key)
    values = [api.job(i)[field] for i in up]
    assert values == sorted(values)


@pytest.mark.parametrize("sort", ["created", "-created", "name", "-priority"])
def test_job_list_paging_is_stable_while_jobs_come_and_go(api: Api, sort: str) -> None:
    before = [api.submit(name=f"j{i % 3}", priority=i % 2) for i in range(9)]
    gone = before.pop(4)
    seen: list[str] = []
    cursor = None
    for round_ in range(20):
        query = {"sort": sort, "limit": 2} | ({"cursor": cursor} if cursor else {})
        answer = api.client.get("/v1/jobs", params=query).json()
        seen += [item["id"] for item in answer["items"]]
        cursor = answer["next_cursor"]
        if cursor is None:
            break
        api.submit(name=f"j{round_ % 3}", priority=round_ % 2)
        if round_ == 0:
            with api.database.write() as session:
                session.execute(sa.delete(Job).where(Job.id == gone))
    assert len(seen) == len(set(seen))
    assert set(before) <= set(seen)


def test_patch_merges_labels_changes_the_etag_and_honours_if_match(api: Api) -> None:
    job_id = api.submit(labels={"a": "1", "b": "2"})
    before = api.client.get(f"/v1/jobs/{job_id}").headers["etag"]
    answer = api.client.patch(
        f"/v1/jobs/{job_id}", json={"labels": {"a": None, "c": "3"}, "priority": 5}, headers={"If-Match": before}
    )
    assert answer.status_code == 200
    assert answer.json()["labels"] == {"b": "2", "c": "3"}
    assert answer.json()["priority"] == 5
    assert answer.headers["etag"] != before
    assert pages(api, label="c=3") == [[job_id]]
    late = api.client.patch(f"/v1/jobs/{job_id}", json={"priority": 6}, headers={"If-Match": before})
    assert (late.status_code, late.json()["code"]) == (412, "precondition-failed")
    assert api.job(job_id)["priority"] == 5
    same = api.client.patch(f"/v1/jobs/{job_id}", json={"priority": 5}, headers={"If-Match": "*"})
    assert same.headers["etag"] == answer.headers["etag"]
    weak = api.client.patch(f"/v1/jobs/{job_id}", json={}, headers={"If-Match": "W/" + same.headers["etag"]})
    assert weak.status_code == 412
    several = api.client.patch(f"/v1/jobs/{job_id}", json={}, headers={"If-Match": f'"x", {same.headers["etag"]}'})
    assert several.status_code == 200


def test_concurrent_patches_with_one_etag_let_only_one_succeed(api: Api) -> None:
    job_id = api.submit()
    tag = api.client.get(f"/v1/jobs/{job_id}").headers["etag"]
    start = threading.Barrier(4)
    statuses: list[int] = []

    def patch(priority: int) -> None:
        start.wait(10)
        answer = api.client.patch(f"/v1/jobs/{job_id}", json={"priority": priority}, headers={"If-Match": tag})
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=patch, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(statuses) == [200, 412, 412, 412]


def test_patch_with_too_many_or_invalid_labels_changes_no_label(api: Api) -> None:
    job_id = api.submit(labels={f"k{i}": "v" for i in range(60)})
    answer = api.client.patch(f"/v1/jobs/{job_id}", json={"labels": {f"n{i}": "v" for i in range(5)}})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/labels"
    answer = api.client.patch(f"/v1/jobs/{job_id}", json={"labels": {"k0": None, "-": "v", "+": "v"}})
    assert [error["pointer"] for error in answer.json()["errors"]] == ["/labels/-", "/labels/+"]
    assert len(api.job(job_id)["labels"]) == 60


def test_delete_removes_every_row_and_file_of_the_job(api: Api) -> None:
    job_id = api.submit(labels={"a": "b"})
    root = api.settings.paths.job(job_id).root
    api.attempt(job_id)
    (root / "attempts" / "0001" / "logs").mkdir(parents=True)
    (root / "attempts" / "0001" / "logs" / "rank-00000.log").write_text("hello\n")
    (root / "checkpoints" / "step-000000000005.a0001").mkdir(parents=True)
    assert api.client.delete(f"/v1/jobs/{job_id}").status_code == 409
    api.set_phase(job_id, JobPhase.SUCCEEDED)
    answer = api.client.delete(f"/v1/jobs/{job_id}")
    assert (answer.status_code, answer.json()) == (
        200,
        {"id": job_id, "checkpoints": None, "outputs": None, "remote": None},
    )
    assert not root.exists()
    assert api.client.get(f"/v1/jobs/{job_id}").status_code == 404
    assert api.client.delete(f"/v1/jobs/{job_id}").status_code == 404
    with api.database.read() as session:
        for table in Base.metadata.sorted_tables:
            if table.name not in ("idempotency_keys", "audit"):
                assert session.execute(sa.select(sa.func.count()).select_from(table)).scalar() == 0, table.name


def test_delete_with_keep_checkpoints_leaves_only_the_checkpoints(api: Api) -> None:
    job_id = api.submit()
    paths = api.settings.paths.job(job_id)
    (paths.checkpoints / "step-000000000005.a0001").mkdir(parents=True)
    (paths.root / "attempts").mkdir()
    api.set_phase(job_id, JobPhase.CANCELLED)
    answer = api.client.delete(f"/v1/jobs/{job_id}", params={"keep_checkpoints": "true"})
    assert answer.json() == {
        "id": job_id,
        "checkpoints": str(paths.checkpoints),
        "outputs": None,
        "remote": None,
    }
    assert [p.name for p in paths.root.iterdir()] == ["checkpoints"]
    assert (paths.checkpoints / "step-000000000005.a0001").is_dir()


@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
def test_delete_on_a_disk_that_fills_after_the_commit_uses_the_reserve(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, real = api.submit(), kept_outputs.write_atomic
    api.set_phase(job_id, JobPhase.SUCCEEDED)
    paths = api.settings.paths.job(job_id)
    paths.work_dir.mkdir(parents=True)
    (paths.work_dir / "best.pt").touch()
    paths.attempt(1).root.mkdir(parents=True)
    disk_space.reserve_space(api.database)
    reserve = disk_space._reserve_file(api.database)
    assert reserve is not None

    def write(path: Path, data: bytes, *, durable: bool, mode: int) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data, durable=durable, mode=mode)

    monkeypatch.setattr(kept_outputs, "write_atomic", write)
    answer = api.client.delete(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == str(paths.work_dir)
    assert sorted(path.name for path in paths.root.iterdir()) == ["KEPT", "work"] and reserve.exists()


def test_sweep_deleted_finishes_an_interrupted_deletion(api: Api) -> None:
    there, gone = api.submit(), "job-000000000000"
    for job_id in (there, gone):
        root = api.settings.paths.job(job_id).root
        (root / "checkpoints").mkdir(parents=True)
        (root / MARKER_NAME).write_text("{}")
    assert sweep_deleted(api.database, api.settings.paths) == [gone]
    assert not api.settings.paths.job(gone).root.exists()
    assert api.settings.paths.job(there).checkpoints.is_dir()


def test_delete_with_an_outdated_etag_answers_412(api: Api) -> None:
    job_id = api.submit()
    tag = api.client.get(f"/v1/jobs/{job_id}").headers["etag"]
    api.client.post(f"/v1/jobs/{job_id}/cancel")
    answer = api.client.delete(f"/v1/jobs/{job_id}", headers={"If-Match": tag})
    assert answer.status_code == 412
    assert api.job(job_id)["phase"] == "CANCELLED"


def test_job_views_name_secrets_without_their_values(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    job_id = api.submit(secrets={"API_KEY": {"from_env": "MY_TOKEN"}})
    assert "very-secret-value" not in api.client.get(f"/v1/jobs/{job_id}").text
    assert api.job(job_id)["spec"]["secrets"] == {"API_KEY": {"from_env": "MY_TOKEN", "from_secret": None}}


def test_job_view_shows_the_desired_state(api: Api) -> None:
    job_id = api.submit()
    api.set_phase(job_id, JobPhase.STOPPING, Desired.SUSPEND)
    assert api.job(job_id)["desired"] == "suspend"


def test_reason_and_event_type_of_a_newer_version_are_shown_as_they_are(api: Api) -> None:
    job = api.submit()
    with api.database.write() as session:
        session.execute(sa.update(Job).where(Job.id == job).values(reason="of-tomorrow"))
        session.add(Event(job_id=job, at=now_in(session), type="of-tomorrow", message="new"))
    path = f"/v1/jobs/{job}"
    assert [e["type"] for e in api.client.get(f"{path}/events").json()["items"]] == ["submitted", "of-tomorrow"]
    assert api.client.get(path).json()["reason"] == "of-tomorrow"
    assert [one["reason"] for one in api.client.get("/v1/queue").json()["items"]] == ["of-tomorrow"]


def test_expiry_continues_after_a_job_that_cannot_be_deleted(api: Api) -> None:
    stuck, free = api.submit(), api.submit()
    (api.settings.paths.job(stuck).root / MARKER_NAME).mkdir(parents=True)
    for job_id in (stuck, free):
        api.set_phase(job_id, JobPhase.SUCCEEDED, ttl=0.0)
    Expiry(api.database, api.settings.paths).run()
    assert api.client.get(f"/v1/jobs/{free}").status_code == 404
    assert api.job(stuck)["phase"] == "SUCCEEDED"


def test_expiry_keeps_code_of_earlier_attempts_until_the_job_is_deleted(api: Api) -> None:
    first, second, nobodys = "a" * 64, "b" * 64, "c" * 64
    job_id = api.submit(code={"path": "/project", "digest": second})
    api.attempt(job_id, launch={"launch_file": {"resolved": {"code_digest": first}}})
    api.set_phase(job_id, JobPhase.SUSPENDED)
    for digest in (first, second, nobodys):
        (api.settings.paths.code / digest).mkdir(parents=True)

    def left() -> set[str]:
        Expiry(api.database, api.settings.paths, grace=-1.0).run()
        return {entry.name for entry in api.settings.paths.code.iterdir()} & {first, second, nobodys}

    assert left() == {first, second}
    api.set_phase(job_id, JobPhase.CANCELLED)
    assert api.client.delete(f"/v1/jobs/{job_id}").status_code == 200
    assert left() == set()
