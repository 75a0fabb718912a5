"""What the service makes of copies in an object store, on both databases; the store itself is not asked here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import JobPaths
from ratchet_service.checkpoints import removal
from ratchet_service.db.models import Checkpoint
from ratchet_service.reconciler.launch import newest_recorded
from tests.support.api import Api, checkpoint_message, message, training_message
from tests.support.checkpoints import make_checkpoint
from tests.support.retention import run_retention_for_attempt

URI = "s3://bucket/team"
ID = "step-000000000005.a0001"


@pytest.fixture
def job(api: Api) -> str:
    job_id = api.submit(checkpoint={"uri": URI, "keep_last": 2})
    api.attempt(job_id)
    return job_id


def uploaded(step: int, **fields: Any) -> dict[str, Any]:
    facts = {"step": step, "attempt": 1, "digest": f"d{step}", "uri": f"{URI}/x", "seconds": 0.5, "nbytes": 1200}
    return message("checkpoint_uploaded", -1, **(facts | fields))


def test_fetch_of_a_copy_without_the_object_store_client_names_the_command_that_installs_it(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.report(job, (0, 1, [training_message(), checkpoint_message(5)]), (-1, 1, [uploaded(5)]))
    monkeypatch.setitem(sys.modules, "obstore.store", None)  # as if the package were not installed
    answer = api.client.post(f"/v1/jobs/{job}/checkpoints/{ID}/verify")
    assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint-no-client")
    assert "pip install 'ratchet-train[s3]'" in answer.json()["detail"]


def test_repeated_upload_reports_record_one_object_store_copy(api: Api, job: str) -> None:
    early = api.report(job, (-1, 1, [uploaded(5)])).json()  # before rank 0 has told of the commit
    assert early["acked"] == {"-1": 1}
    assert api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"] == []
    api.report(job, (0, 1, [training_message(), checkpoint_message(5)]), (-1, 2, [uploaded(5), uploaded(5)]))
    (row,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert (row["uri"], row["uploaded_at"]) == (f"{URI}/x", "2030-01-01T00:00:00Z")
    told = [e for e in api.client.get(f"/v1/jobs/{job}/events").json()["items"] if e["type"] == "checkpoint-uploaded"]
    assert [e["data"]["nbytes"] for e in told] == [1200]


def test_upload_listed_before_its_commit_in_one_report_is_recorded(api: Api, job: str) -> None:
    api.report(job, (-1, 1, [uploaded(5)]), (0, 1, [training_message(), checkpoint_message(5)]))
    (row,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert row["uri"] == f"{URI}/x"


def test_upload_report_with_another_digest_is_not_recorded(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message(), checkpoint_message(5)]), (-1, 1, [uploaded(5, digest="other")]))
    (row,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert row["uploaded_at"] is None
    (event,) = [
        e for e in api.client.get(f"/v1/jobs/{job}/events").json()["items"] if e["type"] == "checkpoint-ignored"
    ]
    assert "recorded with digest d5" in event["message"]


def test_agent_messages_are_refused_for_jobs_without_a_checkpoint_uri(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    answer = api.report(job_id, (-1, 1, [uploaded(5)]))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-report")


def test_checkpoints_lost_from_disk_stay_committed_only_with_a_copy(api: Api, job: str) -> None:
    api.report(
        job,
        (0, 1, [training_message(), *(checkpoint_message(step) for step in (5, 10, 15, 20))]),
        (-1, 1, [uploaded(step) for step in (5, 10, 15)]),
    )
    paths: JobPaths = api.settings.paths.job(job)
    for step in (5, 10, 15):
        make_checkpoint(paths.checkpoints, step, job_id=job)
    segments = [Segment(attempt=1, after_step=0)]
    run_retention_for_attempt(api.database, job, paths, segments, 1)
    with api.database.read() as session:
        assert states(session, job) == {5: "deleted", 10: "committed", 15: "committed", 20: "deleted"}
        newest = newest_recorded(session, job, segments)
        assert newest is not None and (newest.step, newest.digest) == (15, "d15")
    for step in (10, 15):
        for path in paths.checkpoint(step, 1).iterdir():
            path.unlink()
    run_retention_for_attempt(api.database, job, paths, segments, 1)
    with api.database.read() as session:
        assert states(session, job)[15] == "committed"
    api.report(job, (-1, 4, [uploaded(20)]))  # fetched: it is here again
    with api.database.read() as session:
        assert states(session, job)[20] == "committed"


def test_retention_records_deletions_although_one_deletion_failed(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (5, 10, 15, 20, 25)
    api.report(
        job,
        (0, 1, [training_message(), *(checkpoint_message(step) for step in steps)]),
        (-1, 1, [uploaded(step) for step in steps]),
    )
    paths: JobPaths = api.settings.paths.job(job)
    for step in steps:
        make_checkpoint(paths.checkpoints, step, job_id=job)
    real = removal.delete_unless_pinned

    def refuses(directory: Path) -> bool:
        if directory == paths.checkpoint(10, 1):
            raise CheckpointError("immutable", code="checkpoint-unreadable")
        return real(directory)

    monkeypatch.setattr(removal, "delete_unless_pinned", refuses)
    run_retention_for_attempt(api.database, job, paths, [Segment(attempt=1, after_step=0)], 1)
    with api.database.read() as session:
        found = states(session, job)
    assert found == {5: "deleted", 10: "committed", 15: "deleted", 20: "committed", 25: "committed"}


def test_quarantined_checkpoint_fetched_from_the_store_is_committed_again(api: Api, job: str) -> None:
    manifest = make_checkpoint(api.settings.paths.job(job).checkpoints, 5, job_id=job)
    told = uploaded(5, digest=manifest.digest)
    api.report(job, (0, 1, [training_message(), checkpoint_message(5, digest=manifest.digest)]), (-1, 1, [told]))
    with api.database.write() as session:
        row = session.get_one(Checkpoint, (job, 5, 1))
        row.state, row.verification, row.verification_error = "quarantined", "damaged", "block 0"
    api.report(job, (-1, 2, [told]))
    (row_view,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert (row_view["state"], row_view["verification"], row_view["verification_error"]) == ("committed", None, None)


def states(session: Any, job_id: str) -> dict[int, str]:
    return {row.step: row.state for row in session.query(Checkpoint).filter_by(job_id=job_id)}
