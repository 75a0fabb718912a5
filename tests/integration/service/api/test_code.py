"""A job's code over HTTP, as the agent of a node without a shared disk fetches it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.code.archive import unpack
from ratchet_contract.phases import AttemptPhase
from ratchet_service.db.models import Job
from ratchet_service.user_code.snapshot import snapshot, snapshot_file
from tests.support.api import TOKEN, Api


@pytest.fixture
def code(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "big.py").write_text("x = 1  # and more\n" * 200_000)
    (root / "alias.py").symlink_to("pkg/big.py")
    return root


def get(api: Api, job_id: str, digest: str, number: int | str = 1, token: str | None = TOKEN) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return api.client.get(f"/v1/jobs/{job_id}/attempts/{number}/code/{digest}", headers=headers)


def test_code_download_is_limited_to_the_running_attempt_of_the_job(api: Api, code: Path, tmp_path: Path) -> None:
    home = api.settings.paths.code
    other, digest = snapshot(code / "pkg", home), snapshot(code, home)
    (tmp_path / "weights.safetensors").write_bytes(b"w" * 100)
    start = snapshot_file(tmp_path / "weights.safetensors", home)
    job_id = api.submit()
    api.attempt(job_id)
    with api.database.write() as session:
        job = session.get_one(Job, job_id)
        job.resolved = {**job.resolved, "code_digest": digest, "start_digest": start}

    answer = get(api, job_id, digest)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert get(api, job_id, digest).content == answer.content  # the same bytes each time
    unpack(io.BytesIO(answer.content), digest, tmp_path / "node" / digest)
    assert (tmp_path / "node" / digest / "alias.py").read_text() == (code / "pkg" / "big.py").read_text()
    unpack(io.BytesIO(get(api, job_id, start).content), start, tmp_path / "node" / start, one_file=True)
    assert (tmp_path / "node" / start / "weights.safetensors").read_bytes() == b"w" * 100

    def refused(*args: Any, **more: Any) -> tuple[int, str]:
        found = get(api, *args, **more)
        assert found.headers["content-type"] == "application/problem+json"
        return found.status_code, found.json()["code"]

    assert refused(job_id, other) == (404, "code-not-found")  # there, but not this job's
    assert refused(job_id, "f" * 64) == (404, "code-not-found")
    assert refused(job_id, digest, token=None) == (401, "token-missing")
    assert refused(job_id, digest, token="another") == (403, "token-wrong")
    assert refused(job_id, digest, number=2) == (404, "attempt-not-found")
    assert refused(job_id, digest, number="x") == (404, "attempt-not-found")
    assert refused("job-unknown", digest) == (404, "attempt-not-found")
    api.attempt(job_id, 2, AttemptPhase.RUNNING)
    assert refused(job_id, digest) == (409, "stale-attempt")  # a zombie
    events = api.client.get(f"/v1/jobs/{job_id}/events").json()["items"]
    (told,) = [e["message"] for e in events if e["type"] == "stale-request"]
    assert "a request for code was refused" in told
