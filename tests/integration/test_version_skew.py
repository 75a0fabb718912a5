"""An upgrade while jobs run: agents and ranks of the version before under this service, this version's under that one, and a
service that is replaced. Real processes of both versions; ranks do not train (``trainer``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_client import RatchetClient
from ratchet_contract.errors import NotFound
from tests.support.cli import Cli
from tests.support.old_version import FIRST_QUEUE, REVISION, ROOT, environ, unpack
from tests.support.plane import trainer_spec
from tests.support.skewed_home import STEPS, Home, committed


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("before"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


def newest(job: dict[str, Any]) -> int:
    """Number of its newest attempt, which the version before calls its epoch."""
    return int(job["attempt"] if "attempt" in job else job["epoch"])


@pytest.mark.parametrize("which", ["agents of the version before", "service of the version before"])
def test_a_job_that_fails_and_resumes_under_two_versions(home: Home, before: Path, which: str) -> None:
    """Attempt 1 loses its rank, attempt 2 goes on from its checkpoint; a "save now" and a preemption in between are heard."""
    old_agents = which.startswith("agents")
    home.serve(ROOT if old_agents else before, before if old_agents else ROOT)
    home.ready()
    job_id = home.submit(epochs={"1": {"at": 25, "do": "kill"}}, redone=True)
    job = home.ended(job_id)
    if not old_agents:  # a kind of message that it does not know comes as one that it does
        (told,) = [event for event in home.history(job_id) if event["type"] == "note.redone"]
        assert told["message"] == "5 of 5 redone steps gave the same"
    assert (newest(job), job["progress"]["step"]) == (2, STEPS), job
    assert committed(home, job_id)[-1] == STEPS
    attempts = home.call("GET", f"/v1/jobs/{job_id}/attempts")["items"]
    assert [(a["cause"], a["base"]["step"]) for a in reversed(attempts)] == [("rank-killed", 0), ("completed", 20)]
    other = home.submit(steps=100_000)
    home.wait(other, lambda job: job["progress"]["step"] > 20, "progress")
    home.call("POST", f"/v1/jobs/{other}/preempt")
    home.wait(other, lambda job: newest(job) == 2 and job["phase"] == "RUNNING", "the second attempt")
    home.call("POST", f"/v1/jobs/{other}/cancel")
    home.wait(other, lambda job: job["phase"] == "CANCELLED", "the cancel")


def test_a_service_is_replaced_while_a_job_runs(home: Home, before: Path) -> None:
    """The database comes up to date under the running agent; then the service of the version before will not have it."""
    home.serve(before, before)
    home.ready()
    job_id, other = home.submit(steps=100_000), home.submit(steps=400)
    running = home.wait(job_id, lambda job: job["progress"]["step"] > 20, "progress")
    home.kill()
    home.serve(ROOT, ROOT)
    home.ready()
    moved = home.wait(job_id, lambda job: job["progress"]["step"] > running["progress"]["step"] + 20, "more progress")
    assert (moved["attempt"], moved["owner"]) == (1, "local")
    assert home.ended(other)["attempt"] == 1
    home.call("POST", f"/v1/jobs/{job_id}/preempt")
    home.wait(job_id, lambda job: job["attempt"] == 2 and job["phase"] == "RUNNING", "an attempt of the new version")
    assert [e["type"] for e in home.history(job_id)].count("launch") == 2

    home.kill()
    older = home.serve(before, before)
    assert older.wait(60) != 0
    assert "Can't locate revision" in home.log()
    home.serve(ROOT, ROOT)
    home.ready()
    step = home.call("GET", f"/v1/jobs/{job_id}")["progress"]["step"]
    home.wait(job_id, lambda job: job["attempt"] == 2 and job["progress"]["step"] > step + 20, "the job as it was")
    home.call("POST", f"/v1/jobs/{job_id}/cancel")
    home.wait(job_id, lambda job: job["phase"] == "CANCELLED", "the cancel")


def test_a_replica_of_the_version_before_runs_on_beside_this_one(home: Home, before: Path) -> None:
    """As in a rolling update: what it writes fits the new schema."""
    home.serve(before, before)
    home.ready()
    engine = sa.create_engine(f"sqlite:///{home.paths.database}")
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one() == REVISION
    engine.dispose()
    code = "import sys; from ratchet_service.database import Database; from ratchet_service.migrate import upgrade; "
    code += "upgrade(Database(sys.argv[1]))"
    url = f"sqlite:///{home.paths.database}"
    subprocess.run([sys.executable, "-P", "-c", code, url], env=environ(ROOT), check=True, timeout=60)
    job_id = home.call("POST", "/v1/jobs", trainer_spec({"steps": STEPS, "every": 10}, labels={"team": "x"}))["id"]
    job = home.ended(job_id)
    assert (job["epoch"], job["progress"]["step"]) == (1, STEPS)
    home.kill()
    home.serve(ROOT, ROOT)
    home.ready()
    assert [j["id"] for j in home.call("GET", "/v1/jobs?label=team%3Dx")["items"]] == [job_id]
    assert home.call("GET", f"/v1/jobs/{job_id}")["owner"] == "local"


def test_this_versions_client_shows_what_an_older_service_tells_of_its_queue(
    home: Home, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What it does not tell is unknown, and said to be; nothing else is made up for it."""
    older = unpack(tmp_path_factory.mktemp("first-queue"), FIRST_QUEUE)
    home.serve(older, older)
    home.ready()
    runs = home.submit(steps=100_000)
    home.wait(runs, lambda job: job["phase"] == "RUNNING", "the first to run")
    resources = {"cpus_per_rank": 4}
    waits = [str(home.call("POST", "/v1/jobs", trainer_spec({}, resources=resources))["id"]) for _ in range(2)]
    with RatchetClient(home=home.paths.home) as client:
        assert [(one.position, one.job_id) for one in client.queue()] == [(1, waits[0]), (2, waits[1])]
        view = client.queue_view()
        assert (view.waiting, len(view.items)) == (None, 2)
    shown = Cli(home.paths.home, home.paths.home)("queue")
    assert waits[1] in shown.text and "is not known" in shown.errors


def test_a_service_without_a_queue_to_show_is_told_to_be_older(home: Home, before: Path) -> None:
    home.serve(before, before)
    home.ready()
    with RatchetClient(home=home.paths.home) as client, pytest.raises(NotFound, match="older than this client"):
        client.queue_view()
