# ruff: noqa: F811  (fixtures)
"""``checkpoint.uri`` through the real service, on a real S3 server: a job that loses its disk goes on from the store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from safetensors.numpy import load

from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.job_files.delete_job import sweep_deleted
from ratchet_store.object_store.client import open_store
from ratchet_store.read.compare import compare, render
from tests.support.object_stores import BUCKET, S3Server, s3_server  # noqa: F401
from tests.support.server import Server

URI = f"s3://{BUCKET}/team"
ARGUMENTS = {"steps": 600, "width": 8, "batch_size": 16, "evaluate": False}


@contextmanager
def environment(s3_server: S3Server) -> Iterator[None]:
    """This process's, and that of those it starts, names the store."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environ.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def served(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service that finds the store by its environment, and so do the agents that it starts."""
    with environment(s3_server):
        variables = {"TEST_STEP_SECONDS": "0.01"}  # a suspension over REST comes before the end
        server = Server(tmp_path_factory.mktemp("service") / "home", variables=variables)
        try:
            yield server.start()
        finally:
            server.stop()


def spec(uri: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": "copied",
        "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": ARGUMENTS},
        "env": {"OMP_NUM_THREADS": "1"},
        "world": {"ranks_per_node": 1, "device": "cpu"},
        "hook": {"name": "powerSGD", "matrix_approximation_rank": 1, "start_powerSGD_iter": 5},
        "checkpoint": {"every_steps": 100, "uri": uri},
        **more,
    }


def stored(server: Server, job_id: str) -> list[dict[str, Any]]:
    return list(server.call("GET", f"/v1/jobs/{job_id}/checkpoints").json()["items"])


def events(server: Server, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in server.events(job_id) if event["type"] == kind]


def test_job_with_lost_disk_resumes_exactly_from_object_store(served: Server, s3_server: S3Server) -> None:
    server = served
    alone = server.submit(spec(URI))
    job_id = server.submit(spec(URI))
    server.wait_step(job_id, 20)
    server.call("POST", f"/v1/jobs/{job_id}/suspend")
    server.wait_phase(job_id, "SUSPENDED")
    newest = stored(server, job_id)[0]
    assert newest["uploaded_at"] is not None, server.rank_logs(job_id)
    assert newest["uri"] == f"{URI}/{job_id}/checkpoints/{newest['id']}"
    assert events(server, job_id, "checkpoint-uploaded")
    shutil.rmtree(server.paths.job(job_id).checkpoints)

    server.call("POST", f"/v1/jobs/{job_id}/resume")
    server.wait_phase(job_id, "SUCCEEDED")
    server.wait_phase(alone, "SUCCEEDED")
    attempt = server.attempts(job_id)[1]
    assert attempt["base"]["step"] == newest["step"]
    assert attempt["resume_report"]["verdict"] == "exact", attempt["resume_report"]
    assert any(f"fetched from {newest['uri']}" in note for note in attempt["resume_report"]["notes"])
    assert events(server, job_id, "note.checkpoint-fetched")
    last = [server.paths.job(one).checkpoints / stored(server, one)[0]["id"] for one in (alone, job_id)]
    compared = compare(*last)
    assert compared.identical, render(compared)
    assert stored(server, job_id)[0]["uploaded_at"] is not None

    _what_only_the_store_has(server, job_id)
    s3_server.fault = lambda method, _path: "403" if method in ("POST", "DELETE") else None
    answer = server.call("DELETE", f"/v1/jobs/{job_id}").json()
    assert answer["checkpoints"] is None
    assert f"{URI}/{job_id} was not deleted" in answer["remote"]
    s3_server.fault = lambda _method, _path: None
    assert any(job_id in path for path in names(s3_server))
    with environment(s3_server):  # as a service does when it starts
        assert sweep_deleted(Database(sqlite_url(server.paths.database)), server.paths) == [job_id]
    assert not any(job_id in path for path in names(s3_server))
    assert not server.paths.job(job_id).root.exists()

    copies, directory = names(s3_server), server.paths.job(alone).checkpoints
    kept = server.call("DELETE", f"/v1/jobs/{alone}?keep_checkpoints=true").json()
    assert (kept["checkpoints"], kept["remote"]) == (str(directory), None)
    assert copies and names(s3_server) == copies and (directory / last[0].name / "MANIFEST.json").is_file()


def _what_only_the_store_has(server: Server, job_id: str) -> None:
    """It is verified, exported and forked from like any other; here with a number of ranks that its manifest forbids."""
    row, directory = stored(server, job_id)[0], server.paths.job(job_id).checkpoints
    shutil.rmtree(directory / row["id"])
    found = server.call("POST", f"/v1/jobs/{job_id}/checkpoints/{row['id']}/verify").json()
    assert found["verification"] == "ok"
    assert (directory / row["id"] / "MANIFEST.json").is_file()
    shutil.rmtree(directory / row["id"])
    exported = server.call("GET", f"/v1/jobs/{job_id}/checkpoints/{row['id']}/export").content
    assert load(exported).keys() and (directory / row["id"] / "MANIFEST.json").is_file()
    shutil.rmtree(directory / row["id"])
    request = {"checkpoint_id": row["id"], "spec": {"world": {"ranks_per_node": 2}}}
    answer = server.call("POST", f"/v1/jobs/{job_id}/fork", json=request, expect=422).json()
    assert [e["code"] for e in answer["errors"]] == ["world-size-mismatch"], "its manifest was not read"
    assert (directory / row["id"] / "MANIFEST.json").is_file()


def names(s3_server: S3Server) -> list[str]:
    with environment(s3_server):
        return list(open_store(URI).list())


def test_unusable_object_store_is_refused_at_submission(served: Server, s3_server: S3Server) -> None:
    server = served

    def refused(uri: str) -> dict[str, Any]:
        body = server.call("POST", "/v1/jobs?dry_run=true", json=spec(uri), expect=422).json()
        (error,) = body["errors"]
        assert error["pointer"] == "/checkpoint/uri"
        return dict(error)

    server.call("POST", "/v1/jobs?dry_run=true", json=spec(URI))
    assert not any("probe" in path for path in names(s3_server))
    assert refused("s3://nobody-has-this/x")["code"] == "uri-denied"
    s3_server.fault = lambda _method, _path: "403"
    denied = refused(URI)
    assert denied["code"] == "uri-denied"
    assert "AWS_ACCESS_KEY_ID" in denied["detail"]
    s3_server.fault = lambda _method, _path: "503"
    assert refused(URI)["code"] == "uri-not-reached"
    s3_server.fault = lambda _method, _path: "hang"
    assert refused(URI)["code"] == "uri-not-reached"
    s3_server.fault = lambda _method, _path: None
    s3_server.unconditional = True
    assert refused(URI)["code"] == "uri-no-put-if-absent"
    s3_server.unconditional = False
