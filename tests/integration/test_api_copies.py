"""What the service makes of copies in an object store, on both databases; the store itself is not asked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import JobPaths
from ratchet_contract.resume import Segment
from ratchet_service import removal
from ratchet_service.launch_files import newest_recorded
from ratchet_service.models import Checkpoint
from tests.support.api import Api, checkpoint_message, message, training_message
from tests.support.checkpoints import make_checkpoint
from tests.support.retention import tidy

URI = "s3://bucket/team"
ID = "step-000000000005.a0001"


@pytest.fixture
def job(api: Api) -> str:
    job_id = api.submit(checkpoint={"uri": URI, "keep_last": 2})
    api.attempt(job_id)
    return job_id


def uploaded(step: int, **fields: Any) -> dict[str, Any]:
    facts = {"step": step, "epoch": 1, "digest": f"d{step}", "uri": f"{URI}/x", "seconds": 0.5, "nbytes": 1200}
    return message("checkpoint_uploaded", -1, **(facts | fields))


def test_a_copy_is_recorded_once_however_often_it_is_told(api: Api, job: str) -> None:
    early = api.report(job, (-1, 1, [uploaded(5)])).json()  # before rank 0 has told of the commit
    assert early["acked"] == {"-1": 1}
    assert api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"] == []
    api.report(job, (0, 1, [training_message(), checkpoint_message(5)]), (-1, 2, [uploaded(5), uploaded(5)]))
    (row,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert (row["uri"], row["uploaded_at"]) == (f"{URI}/x", "2030-01-01T00:00:00Z")
    told = [e for e in api.client.get(f"/v1/jobs/{job}/events").json()["items"] if e["type"] == "checkpoint-uploaded"]
    assert [e["data"]["nbytes"] for e in told] == [1200]


def test_a_copy_is_recorded_whichever_of_a_report_comes_first(api: Api, job: str) -> None:
    api.report(job, (-1, 1, [uploaded(5)]), (0, 1, [training_message(), checkpoint_message(5)]))
    (row,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert row["uri"] == f"{URI}/x"


def test_a_copy_of_other_bytes_is_told_and_not_recorded(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message(), checkpoint_message(5)]), (-1, 1, [uploaded(5, digest="other")]))
    (row,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert row["uploaded_at"] is None
    (event,) = [
        e for e in api.client.get(f"/v1/jobs/{job}/events").json()["items"] if e["type"] == "checkpoint-ignored"
    ]
    assert "recorded with digest d5" in event["message"]


def test_an_agent_speaks_for_itself_only_where_the_job_has_a_uri(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    answer = api.report(job_id, (-1, 1, [uploaded(5)]))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-report")


def test_what_a_lost_disk_had_stays_recorded_only_where_it_has_a_copy(api: Api, job: str) -> None:
    api.report(
        job,
        (0, 1, [training_message(), *(checkpoint_message(step) for step in (5, 10, 15, 20))]),
        (-1, 1, [uploaded(step) for step in (5, 10, 15)]),
    )
    paths: JobPaths = api.settings.paths.job(job)
    for step in (5, 10, 15):
        make_checkpoint(paths.checkpoints, step, job_id=job)
    segments = [Segment(epoch=1, after_step=0)]
    tidy(api.database, job, paths, segments, 1)
    with api.database.read() as session:
        assert states(session, job) == {5: "deleted", 10: "committed", 15: "committed", 20: "deleted"}
        newest = newest_recorded(session, job, segments)
        assert newest is not None and (newest.step, newest.digest) == (15, "d15")
    for step in (10, 15):
        for path in paths.checkpoint(step, 1).iterdir():
            path.unlink()
    tidy(api.database, job, paths, segments, 1)
    with api.database.read() as session:
        assert states(session, job)[15] == "committed"
    api.report(job, (-1, 4, [uploaded(20)]))  # fetched: it is here again
    with api.database.read() as session:
        assert states(session, job)[20] == "committed"


def test_what_was_deleted_before_a_deletion_failed_is_recorded_so(
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
    tidy(api.database, job, paths, [Segment(epoch=1, after_step=0)], 1)
    with api.database.read() as session:
        found = states(session, job)
    assert found == {5: "deleted", 10: "committed", 15: "deleted", 20: "committed", 25: "committed"}


def test_what_was_set_aside_here_and_fetched_again_is_committed(api: Api, job: str) -> None:
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
