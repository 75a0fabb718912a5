"""A service that exports real checkpoints, with rows for them as a job's attempt would have left them; without torch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet_contract.phases import JobPhase
from ratchet_contract.processes import procfs
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import Database
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Job
from ratchet_store.format.manifest_file import read_manifest
from tests.support.api import Api, FakeSubmission, Server, checkpoint_message, training_message
from tests.support.server import wait_for


@contextmanager
def export_service(home: Path, **settings: Any) -> Iterator[Api]:
    """On a SQLite database of its own."""
    told = Settings(home, **settings)
    database, submission = Database(told.url), FakeSubmission()
    upgrade(database)
    try:
        with (
            Server(create_app(told, submission, database)) as url,
            httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
        ):
            yield Api(client, database, told, submission)
    finally:
        database.dispose()


def store_checkpoint_for_export(api: Api, checkpoint: Path, python: str = sys.executable, **changes: Any) -> str:
    """The path of a checkpoint's export: of a job with a copy of it, which has the tests' own interpreter. ``changes``: of its
    specification."""
    manifest = read_manifest(checkpoint)
    job_id = api.submit(**changes)
    api.attempt(job_id, manifest.attempt)
    target = api.settings.paths.job(job_id).checkpoint(manifest.step, manifest.attempt)
    shutil.copytree(checkpoint, target)
    told = checkpoint_message(manifest.step, manifest.attempt, digest=manifest.digest)
    assert api.report(job_id, (0, 1, [training_message(), told]), number=manifest.attempt).status_code == 200
    with api.database.read() as session:
        job = session.get_one(Job, job_id)
    named = {"spec": {**job.spec, "python": python}, "resolved": {**job.resolved, "python": python}}
    api.set_phase(job_id, JobPhase.RUNNING, **named)
    return f"/v1/jobs/{job_id}/checkpoints/{manifest.id}/export"


HELD = """
import os, pathlib, subprocess, time
if os.environ.get("RATCHET_ASKED"):
    other = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    pathlib.Path({going!r}, f"{{os.getpid()}}-{{other.pid}}").touch()
    while not os.path.exists({go!r}):
        time.sleep(0.01)
"""
"""What the interpreter of an export runs first, and there waits, as it would for a disk that does not answer."""

SILENT = """
import os, pathlib, time
opened = os.fdopen
asked = "RATCHET_ASKED" in os.environ
def fdopen(fd, *args, **more):
    if asked and os.readlink(f"/proc/self/fd/{{fd}}").endswith("MANIFEST.json"):
        pathlib.Path({pid!r}).write_text(str(os.getpid()))
        time.sleep(3600)
    return opened(fd, *args, **more)
os.fdopen = fdopen
"""
"""A manifest on a disk that does not answer."""

SERVICE = """
import sys
from pathlib import Path
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import Database
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.usecases.export import Exporter

settings = Settings(Path(sys.argv[1]))
limit = ConcurrencyLimit(1, "")
Exporter(Database(settings.url), settings.paths, limit, 600.0, lambda _: True).export(*sys.argv[2:], "safetensors")
"""


class Held:
    """Exports that begin and go on when they are let."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._going, self._go = root / "going", root / "go"
        self._going.mkdir()
        (root / "site").mkdir()
        text = HELD.format(going=str(self._going), go=str(self._go))
        (root / "site" / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(root / "site"))  # the service's own: an export gets none of a job

    def export_processes(self) -> list[list[int]]:
        """Of each export: its process, and one that it started."""
        return [[int(pid) for pid in path.name.split("-")] for path in self._going.iterdir()]

    def wait(self) -> list[int]:
        """The processes of the one that runs."""
        running = wait_for(
            lambda: [pids for pids in self.export_processes() if not have_ended(pids)], "an export to begin"
        )
        return running[0]

    def release(self) -> None:
        self._go.touch()


def have_ended(pids: list[int]) -> bool:
    return all(procfs.start_time(pid) is None for pid in pids)


FULL = """
import os, shutil, sys
from pathlib import Path
from tests.support.export_service import export_service, store_checkpoint_for_export

checkpoint, disk = map(Path, sys.argv[1:])
with export_service(disk, database_url=f"sqlite:///{checkpoint.parent}/full.db") as api:
    url = store_checkpoint_for_export(api, checkpoint)
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        os.truncate(filler, filler.stat().st_size - 8192)
    before = sorted(disk.rglob("*")), shutil.disk_usage(disk).free
    for form in ("safetensors", "torch", "dcp"):
        answer = api.client.get(url, params={"format": form})
        assert "nothing was exported" in answer.json()["detail"], answer.text
        print(form, answer.status_code, answer.json()["code"])
    assert (sorted(disk.rglob("*")), shutil.disk_usage(disk).free) == before
    filler.unlink()
    print("dcp", api.client.get(url, params={"format": "dcp"}).status_code)
"""
"""Exports to a disk that is full, and to the same one when there is room."""
