"""A service that exports real checkpoints, with rows for them as a job's attempt would have left them; without torch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ratchet_contract.phases import JobPhase
from ratchet_service.app import create_app
from ratchet_service.database import Database
from ratchet_service.migrate import upgrade
from ratchet_service.models import Job
from ratchet_service.settings import Settings
from ratchet_store.commit import read_manifest
from tests.support.api import Api, FakePorts, Server, checkpoint_message, training_message


@contextmanager
def exporting(home: Path, **settings: Any) -> Iterator[Api]:
    """On a SQLite database of its own."""
    told = Settings(home, **settings)
    database, ports = Database(told.url), FakePorts()
    upgrade(database)
    try:
        with (
            Server(create_app(told, ports, database)) as url,
            httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
        ):
            yield Api(client, database, told, ports)
    finally:
        database.dispose()


def stored(api: Api, checkpoint: Path, **env: str) -> str:
    """The path of a checkpoint's export: of a job with a copy of it, which has the tests' own interpreter under ``env``."""
    manifest = read_manifest(checkpoint)
    job_id = api.submit(env=env)
    api.attempt(job_id, manifest.epoch)
    target = api.settings.paths.job(job_id).checkpoint(manifest.step, manifest.epoch)
    shutil.copytree(checkpoint, target)
    told = checkpoint_message(manifest.step, manifest.epoch, digest=manifest.digest)
    assert api.report(job_id, (0, 1, [training_message(), told]), number=manifest.epoch).status_code == 200
    with api.database.read() as session:
        resolved = session.get_one(Job, job_id).resolved
    api.put(job_id, JobPhase.RUNNING, resolved={**resolved, "python": sys.executable})
    return f"/v1/jobs/{job_id}/checkpoints/{manifest.id}/export"
