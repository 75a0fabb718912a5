"""A run directory whose services and agents are of different versions: real processes of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from ratchet_contract.paths import HomePaths
from tests.support.control_plane import trainer_spec
from tests.support.old_version import ROOT, version_environment
from tests.support.server import processes_below, wait_for

STEPS = 60


class Home:
    """A run directory, and the service that has it now."""

    def __init__(self, folder: Path) -> None:
        self.paths = HomePaths(folder)
        self.process: subprocess.Popen[bytes] | None = None

    def serve(self, service: Path, agents: Path) -> subprocess.Popen[bytes]:
        """Packages of the checkout ``service`` in the service's process, of ``agents`` in those that it starts: ``trainer``'s."""
        script = str(ROOT / "tests/support/version_skew_service.py")
        env = version_environment(service) | {"SKEW_AGENTS": version_environment(agents)["PYTHONPATH"]}
        return self._start([sys.executable, "-P", script, str(self.paths.home), "4"], env, service)

    def serve_from(self, python: Path) -> subprocess.Popen[bytes]:
        """The real service and agents of the virtual environment whose interpreter this is."""
        command = [str(python), "-P", "-m", "ratchet_service", "serve", "--home", str(self.paths.home)]
        env = {key: value for key, value in version_environment(ROOT).items() if key != "PYTHONPATH"}
        return self._start([*command, "--port", "0", "--cpu-slots", "4"], env, self.paths.home)

    def _start(self, command: list[str], env: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
        with (self.paths.home / "service.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder)
        return self.process

    def ready(self) -> None:
        process = self.process
        assert process is not None

        def there() -> bool:
            assert process.poll() is None, self.log()
            with suppress(OSError, ValueError):
                return int(json.loads(self.paths.service_file.read_text())["pid"]) == process.pid
            return False

        wait_for(there, "the service to listen", 60)

    def log(self) -> str:
        return (self.paths.home / "service.log").read_text()[-4000:]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Nothing of it runs on."""
        if self.process is not None:
            self.kill()
        for pid in processes_below(self.paths.home):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_below(self.paths.home), "all processes to go", 10)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        url = json.loads(self.paths.service_file.read_text())["url"]
        answer = httpx.request(method, url + path, json=body, timeout=30, verify=False)
        assert answer.is_success, answer.text
        return answer.json()

    def submit(self, **plan: Any) -> str:
        spec = trainer_spec({"steps": STEPS, "every": 10, "pause": 0.02} | plan)
        return str(self.call("POST", "/v1/jobs", spec)["id"])

    def wait(self, job_id: str, happened: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job: dict[str, Any] = self.call("GET", f"/v1/jobs/{job_id}")
            assert happened(job) or job["phase"] not in ("FAILED", "CANCELLED"), (
                job["reason"],
                job["message"],
                self.log(),
            )
            return job if happened(job) else None

        found = wait_for(look, what, 60)
        assert isinstance(found, dict)
        return found

    def wait_succeeded(self, job_id: str) -> dict[str, Any]:
        return self.wait(job_id, lambda job: job["phase"] == "SUCCEEDED", "the job's end")

    def history(self, job_id: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.call("GET", f"/v1/jobs/{job_id}/events?limit=100")["items"]
        return events


def committed_steps(home: Home, job_id: str) -> list[int]:
    items = home.call("GET", f"/v1/jobs/{job_id}/checkpoints?limit=100")["items"]
    return sorted({item["step"] for item in items if item["lineage"] == "current"})
