"""``make containers``: both images are built, and docker-compose.yml runs with a real engine: killed, stopped, compared.

Needs Docker Engine 25 or newer with Compose 2.24 or newer, and nothing of Ratchet: Python's own library alone. The project is one
of its own (``ratchet-trial``), with a port and volumes of its own, which are removed at the end. ``--file``: one more compose
file, for what a machine needs to build (a proxy, a network). The last line is ``N passed, M failed``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = """p@ss/w:rd#1 %41?&=$x"y"""
ENGINE, COMPOSE = (25, 0), (2, 24)
SPEC: dict[str, Any] = {
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 100}},
    "world": {"ranks_per_node": 2, "device": "cpu"},
    "resources": {"cpus_per_rank": 1},
    "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 50},
    "checkpoint": {"every_steps": 50, "keep_last": 3},
    "policy": {"max_failures": 1},
}
VERSIONS = "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}', end='')"
LOOK_AROUND = """
import pathlib, socket
found = []
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit():
        text = (entry / "environ").read_bytes()
        found += [entry.name] * (b"PGPASSWORD" in text or b"DATABASE_URL" in text)
try:
    socket.create_connection(("database", 5432), 3)
    found.append("the database answers")
except OSError:
    pass
print(found)
"""


def missing() -> str | None:
    """Why there is nothing to run this with; None: there is."""
    if shutil.which("docker") is None:
        return "there is no program `docker`"
    engine = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    if engine.returncode:
        return f"no Docker engine answers: {engine.stderr.strip().splitlines()[-1]}"
    compose = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True)
    if compose.returncode:
        return "docker has no Compose: install its plug-in (`docker compose version`)"
    for name, told, least in (("Docker Engine", engine.stdout, ENGINE), ("Compose", compose.stdout, COMPOSE)):
        numbers = tuple(map(int, re.findall(r"\d+", told)[:2]))
        if numbers < least:
            return f"{name} is {told.strip()}, and docker-compose.yml needs {least[0]}.{least[1]} (start_interval)"
    return None


def say(text: str) -> None:
    print(text, flush=True)


class Trial:
    """One compose project, and what is asked of its API."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        env, torch = folder / "env", os.environ.get("TORCH_INDEX_URL", "")
        env.write_text(f"RATCHET_DB_PASSWORD='{PASSWORD}'\nRATCHET_PORT={self.port}\nTORCH_INDEX_URL={torch}\n")
        named = [part for file in ("docker-compose.yml", *files) for part in ("-f", file)]
        self.command = ["docker", "compose", "-p", "ratchet-trial", "--env-file", str(env), *named]
        self.token = ""
        self.passed = self.failed = 0

    def compose(self, *words: str, quiet: bool = False) -> str:
        """Raises ``RuntimeError``."""
        began = time.monotonic()
        done = subprocess.run([*self.command, *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            told = f"docker compose {' '.join(words)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
            if words[0] == "up":  # which says that a container is not healthy, and not why
                told += (
                    f"\n{self.compose('ps', '--all', quiet=True)}\n{self.compose('logs', '--tail', '40', quiet=True)}"
                )
            raise RuntimeError(told)
        if not quiet:
            say(f"$ docker compose {' '.join(words)}    ({time.monotonic() - began:.1f} s)")
        return done.stdout.strip()

    def change(self) -> None:
        """Another version of both images, from here on."""
        file = self.folder / "changed.yaml"
        labels = {"build": {"labels": {"trial": "changed"}}}
        file.write_text(json.dumps({"services": {"api": labels, "agents": labels}}))
        self.command += ["-f", str(file)]

    def inside(self, service: str, *words: str) -> str:
        return self.compose("exec", "-T", service, *words, quiet=True)

    def inspected(self, service: str, what: str) -> str:
        container = self.compose("ps", "-q", service, quiet=True)
        command = ["docker", "inspect", "--format", what, container]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Asked again while the API restarts, for a minute."""
        data = None if body is None else json.dumps(body).encode()
        head = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        until = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, head, method=method)
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def submit(self, name: str) -> str:
        return str(self.call("POST", "/v1/jobs", {"name": name, **SPEC})["id"])

    def job(self, job: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/jobs/{job}"))

    def step(self, job: str) -> int:
        return int(self.job(job)["progress"]["step"])

    def failures(self, job: str) -> int:
        return int(self.job(job)["budgets"]["failures"])

    def attempts(self, job: str) -> list[dict[str, Any]]:
        return sorted(self.call("GET", f"/v1/jobs/{job}/attempts")["items"], key=lambda one: int(one["number"]))

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = 600) -> None:
        """Raises ``RuntimeError``."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                logs = self.compose("logs", "--tail", "40", quiet=True)
                raise RuntimeError(f"waited {seconds:.0f} s for {what}\n{logs}")
            time.sleep(0.2)

    def check(self, what: str, right: bool, told: Any = "") -> None:
        self.passed, self.failed = self.passed + right, self.failed + (not right)
        say(f"{'ok    ' if right else 'FAILED'} {what}{f': {told}' if told != '' else ''}")


def start(trial: Trial) -> None:
    trial.compose("build")
    trial.compose("up", "-d", "--wait")
    listed = ["docker", "images", "--filter", "reference=ratchet-*", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}"]
    sizes = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\n")
    say("\n".join(sorted(filter(None, sizes))))
    python = trial.inside("agents", "python", "-c", VERSIONS)
    say(f"{python}; {trial.inside('database', 'postgres', '--version')}")
    create = ("python", "-m", "ratchet_service", "token", "create", "--owner", "ann", "--role", "admin")
    trial.token = trial.inside("api", *create)
    trial.check("a password of any characters opens the database", trial.token.startswith("rt_"))
    found = trial.inside("agents", "python", "-c", LOOK_AROUND)
    trial.check("the container of jobs finds no password and no database", found == "[]", found)
    for service in ("api", "reconciler", "agents"):
        said = subprocess.run([*trial.command, "exec", "-T", service, "touch", "/opt/x"], cwd=ROOT, capture_output=True)
        trial.check(f"{service} writes nowhere but to its volume and /tmp", said.returncode != 0)


def hurt_and_compared(trial: Trial) -> None:
    base = trial.submit("base")
    trial.wait("base to succeed", lambda: trial.job(base)["phase"] == "SUCCEEDED")
    trial.check("base, which nobody touches", len(trial.attempts(base)) == 1, f"step {trial.step(base)}")
    hurt = trial.submit("hurt")

    def train_on() -> None:
        step = trial.step(hurt) + 60
        trial.wait(f"step {step} of hurt", lambda: trial.step(hurt) >= step)

    train_on()
    trial.compose("stop", "reconciler")
    train_on()
    trial.change()
    trial.compose("up", "-d", "--build", "--no-deps", "--wait", "api", "reconciler")
    train_on()
    right = len(trial.attempts(hurt)) == 1
    trial.check("reconciler stopped, both upgraded: training goes on", right, f"step {trial.step(hurt)}, attempt 1")
    trial.compose("kill", "agents")
    trial.compose("up", "-d", "--wait", "agents")
    trial.wait("another attempt", lambda: len(trial.attempts(hurt)) == 2)
    first = trial.attempts(hurt)[0]
    right = (first["outcome"], first["cause"], trial.failures(hurt)) == ("preempted", "node-lost", 0)
    told = f"{first['outcome']}, {first['cause']}, {first['steps_lost']} steps lost, {trial.failures(hurt)} failures"
    trial.check("agents killed: no failure of the job's", right, told)
    train_on()
    trial.compose("restart", "database")
    train_on()
    trial.compose("stop", "agents")
    trial.compose("down")
    trial.compose("up", "-d", "--build", "--wait")
    trial.wait("a third attempt", lambda: len(trial.attempts(hurt)) == 3)
    second = trial.attempts(hurt)[1]
    right = (second["outcome"], second["cause"], second["steps_lost"]) == ("preempted", "sigterm", 0)
    told = f"{second['outcome']}, {second['cause']}, {second['steps_lost']} steps lost, {trial.failures(hurt)} failures"
    trial.check("agents stopped: the job saves first, and goes on by itself", right, told)
    trial.wait("hurt to succeed", lambda: trial.job(hurt)["phase"] == "SUCCEEDED")
    told = f"step {trial.step(hurt)}, {len(trial.attempts(hurt))} attempts, {trial.failures(hurt)} failures"
    trial.check("hurt, to its end", trial.failures(hurt) == 0, told)
    jobs = "/var/lib/ratchet/jobs"
    paths = [f"{jobs}/{one}/checkpoints/{trial.job(one)['last_checkpoint']}" for one in (base, hurt)]
    told = trial.inside("api", "python", "-m", "ratchet_store.compare", *paths)  # raises where they differ
    say(f"$ python -m ratchet_store.compare BASE HURT\n{told}")
    trial.check("both end with the same bits", "identical" in told)


def crash(trial: Trial) -> None:
    """SIGKILL of a container's first process, as an OOM kill is."""
    if os.geteuid() != 0:
        say("not run: a crash of a container's process needs root")
        return
    for service in ("api", "reconciler", "agents"):
        os.kill(int(trial.inspected(service, "{{.State.Pid}}")), signal.SIGKILL)
        restarts = lambda: trial.inspected(service, "{{.RestartCount}}") == "1"  # noqa: B023, E731
        trial.wait(f"{service} to be restarted", restarts, 60)
        healthy = lambda: trial.inspected(service, "{{.State.Health.Status}}") == "healthy"  # noqa: B023, E731
        trial.wait(f"{service} to be healthy", healthy, 120)
        trial.check(f"{service} crashes, and is back", True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--file", action="append", default=[], help="one more compose file, for what this machine needs"
    )
    options = parser.parse_args()
    why = missing()
    if why is not None:
        needs = f"It needs Docker Engine {ENGINE[0]} or newer with Compose {COMPOSE[0]}.{COMPOSE[1]} or newer"
        say(f"make containers: {why}. {needs}; Debian 13 has both (docker.io, docker-compose), Debian 12 has neither")
        return 2
    for words in (
        ("version", "--format", "Docker Engine {{.Server.Version}}"),
        ("compose", "version"),
        ("buildx", "version"),
    ):
        say(subprocess.run(["docker", *words], capture_output=True, text=True).stdout.strip())
    say(f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), options.file)
        try:
            start(trial)
            hurt_and_compared(trial)
            crash(trial)
        except RuntimeError as error:
            trial.check("the story to its end", False, error)
        finally:
            trial.compose("down", "-v", "--timeout", "200")
    say(f"{trial.passed} passed, {trial.failed} failed")
    return int(trial.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
