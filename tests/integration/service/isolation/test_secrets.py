"""Secrets are planted everywhere one can be given, a job runs and fails with them, and nothing that anybody is shown has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.engine import make_url

from ratchet_contract.errors import SpecError
from ratchet_contract.phases import JobPhase
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.masking import MASK
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.db.engine import Database
from tests.support.api import Api, spec
from tests.support.control_plane import Plane, trainer_spec
from tests.support.tokens import bearer

pytestmark = pytest.mark.takes_turns

PASSWORD, VALUE, FROM_ENV = "planted-database-password", "planted-env-value", "planted-from-env"


@pytest.fixture
def control_plane(tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """A service in a process of its own; PostgreSQL's URL has a password."""
    monkeypatch.setenv("PLANTED_SECRET", FROM_ENV)
    own = database
    if not database.is_sqlite:
        url = make_url(database.url.render_as_string(hide_password=False)).set(password=PASSWORD)
        own = Database(url.render_as_string(hide_password=False))
    plane = Plane(tmp_path / "home", own)
    try:
        yield plane
    finally:
        plane.close()
        if own is not database:
            own.dispose()


def test_logs_answers_and_files_contain_no_secret_values(control_plane: Plane) -> None:
    control_plane.start_process()
    url = json.loads(control_plane.paths.service_file.read_text())["url"]
    client = httpx.Client(base_url=url, headers=bearer(control_plane.token), timeout=30, verify=False)
    wanted = trainer_spec({"steps": 3, "epochs": {"1": {"at": 2, "do": "kill-agent"}}})
    wanted["env"]["API_KEY"], wanted["secret_env"] = VALUE, ["API_KEY"]
    wanted["secrets"] = {"OTHER_KEY": {"from_env": "PLANTED_SECRET"}}
    wrong = trainer_spec() | {"env": {"API_KEY": [VALUE]}, "secret_env": ["API_KEY"]}
    answers = [
        client.post("/v1/jobs", params={"dry_run": "true"}, json=wanted),
        client.post("/v1/jobs", json=wrong),
        client.post("/v1/jobs", json=wanted, headers={"Idempotency-Key": "k"}),
        client.post("/v1/jobs", json=wanted, headers={"Idempotency-Key": "k"}),
    ]
    job_id = answers[-1].json()["id"]
    control_plane.wait(job_id, JobPhase.SUCCEEDED, deadline=60)
    launch_file = control_plane.attempt_paths(job_id, 1).launch_file
    launch = LaunchFile.model_validate_json(launch_file.read_bytes())
    assert launch.spec.env["API_KEY"] == VALUE and launch_file.stat().st_mode & 0o777 == 0o600
    fork = client.post(f"/v1/jobs/{job_id}/fork", json={"name": "other"})
    base = f"/v1/jobs/{job_id}"
    paths = ["", "/events", "/logs", "/attempts", "/attempts/1", "/checkpoints", "/metrics", "/hook"]
    answers += [fork, *(client.get(base + path) for path in paths)]
    checkpoint = client.get(f"{base}/checkpoints").json()["items"][0]["id"]
    answers += [client.get(f"{base}/checkpoints/{checkpoint}"), client.get("/v1/jobs"), client.get("/metrics"),
                client.get("/v1/tokens"), client.get("/openapi.json"), client.get("/v1/whoami"),
                client.get("/v1/jobs", headers=bearer("rt_aaaaaaaa_" + "x" * 32))]  # fmt: skip
    if fork.status_code == 201:
        assert fork.json()["spec"]["env"]["API_KEY"] == MASK  # and the fork itself has the value
        assert control_plane.job(fork.json()["id"]).spec["env"]["API_KEY"] == VALUE
    client.close()
    assert [answer.status_code for answer in answers[:3]] == [200, 422, 201], [answer.text for answer in answers[:3]]
    assert MASK in str(answers[0].json()["launch"]["ranks"])
    assert answers[3].headers["idempotency-replayed"] == "true"
    assert answers[2].json()["spec"]["env"]["API_KEY"] == MASK
    command = [sys.executable, "-m", "ratchet_service.doctor", "--home", str(control_plane.settings.home)]
    env = {**os.environ, "RATCHET_DATABASE_URL": control_plane.settings.url}
    doctor = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)

    planted = [PASSWORD, VALUE, FROM_ENV, control_plane.token, launch.report_token]
    shown = [(str(answer.request.url), answer.text + str(answer.headers)) for answer in answers]
    shown += [("doctor", doctor.stdout + doctor.stderr)]
    home = control_plane.settings.home
    files = [path for path in home.rglob("*") if path.is_file() and path.name != "launch.json"]
    assert any(path.name.startswith("service-") for path in files) and any(path.name == "agent.log" for path in files)
    shown += [(str(path), path.read_bytes().decode("latin-1")) for path in files]
    found = [(where, secret) for where, text in shown for secret in planted if secret in text]
    assert found == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secret_env": ["KEY"]}, "not in env"),
        ({"env": {"KEY": MASK}, "secret_env": ["KEY"]}, "the mask of a secret value"),
    ],
)
def test_spec_with_inconsistent_secret_env_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_spec(spec(**change))


def test_secret_values_are_excluded_from_digest_views_and_error_messages(api: Api) -> None:
    one, two = (parse_spec(spec(env={"A": "1", "KEY": value}, secret_env=["KEY"])) for value in ("x", "y"))
    assert one.digest() == two.digest() == parse_spec(spec(env={"A": "1"})).digest()
    assert one.digest() != parse_spec(spec(env={"A": "2", "KEY": "x"}, secret_env=["KEY"])).digest()
    answer = api.client.post("/v1/jobs", json=spec(env={"KEY": {"value": VALUE}}))
    assert answer.status_code == 422 and VALUE not in answer.text
    job_id = api.submit(env={"A": "1", "KEY": VALUE}, secret_env=["KEY"])
    assert api.job(job_id)["spec"]["env"] == {"A": "1", "KEY": MASK}
    assert VALUE not in api.client.get("/v1/jobs").text
