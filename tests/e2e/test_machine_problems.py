"""The first hour's trouble with the machine: no service, another program in its place, GPUs that others hold, a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.cli import Cli
from tests.support.fake_interpreters import fake_rank_command, path_with_fake_nvidia_smi, python_with_fake_answer
from tests.support.server import Server, processes_below, wait_for

TASK = {"entrypoint": "ratchet_worker.task:TaskContext"}


@contextmanager
def listening(status: int, headers: dict[str, str], body: bytes) -> Iterator[str]:
    """Something else than a Ratchet service, which answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_command_without_service_explains_how_to_start_one(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ntask: {entrypoint: 'a:b'}\n")
    cli = Cli(tmp_path / "home", tmp_path)
    for words in (["list"], ["submit", "job.yaml"], ["logs", "job-0123456789ab"], ["wait", "job-0123456789ab"]):
        said = cli(*words, expect=6).errors
        assert "`ratchet serve" in said and "--server" in said and str(tmp_path / "home") in said


def test_stale_or_damaged_service_file_is_detected(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    file = {"protocol": 1, "url": "http://127.0.0.1:9", "pid": gone.pid, "started_at": "2026-01-01T00:00:00Z"}
    (home / "service.json").write_text(json.dumps(file))
    cli = Cli(home, tmp_path)
    said = cli("list", expect=6).errors
    assert f"(pid {gone.pid}) has ended" in said and f"`ratchet serve --home {home}`" in said
    (home / "service.json").write_text(json.dumps(file | {"protocol": 9}))
    assert "speaks protocol 9" in cli("list", expect=5).errors
    (home / "service.json").write_text("{")
    damaged = cli("list", expect=6).errors
    assert "damaged" in damaged and f"`ratchet serve --home {home}`" in damaged and "pydantic" not in damaged


def test_address_of_another_program_is_not_taken_for_a_service(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path)
    with listening(200, {"Content-Type": "text/html"}, b"<html>hello</html>") as address:
        for words in (["list"], ["logs", "job-0123456789ab"], ["events", "job-0123456789ab", "-f"]):
            assert "is not a Ratchet service" in cli("--server", f"http://{address}", *words, expect=8).errors
        assert f"write http://{address}" in cli("--server", f"https://{address}", "list", expect=6).errors
        assert "must be like https://host or http://host:8000" in cli("--server", address, "list", expect=5).errors
    with listening(200, {"Content-Type": "application/json"}, b"{}") as address:
        for words in (["list"], ["get", "digits"], ["events", "job-0123456789ab", "-f"]):
            assert "is not a Ratchet service" in cli("--server", f"http://{address}", *words, expect=8).errors
    with listening(404, {"Content-Type": "text/plain"}, b"no") as address:
        assert "is not a Ratchet service" in cli("--server", f"http://{address}", "list", expect=8).errors
    with listening(200, {"Content-Type": "application/json", "Ratchet-Protocol": "2"}, b"{}") as address:
        said = cli("--server", f"http://{address}", "list", expect=5).errors
        assert "speaks protocol 2" in said and "install the same version" in said


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service on a machine whose ``nvidia-smi`` lists two GPUs."""
    root = tmp_path_factory.mktemp("gpus")
    server = Server(root / "home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path_with_fake_nvidia_smi(root / "bin", gpus=2))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        server.start()
    try:
        yield server
    finally:
        server.stop()
        assert not processes_below(root / "home")


def gpu_spec(cli: Cli, python: Path, *, ranks: int, plan: dict[str, Any] | None = None) -> str:
    spec = {"name": "gpu", "task": TASK, "python": str(python), "world": {"ranks_per_node": ranks, "device": "cuda"},
            "resources": {"cpus_per_rank": 1}, "env": {"TRAINER": json.dumps(plan or {})}}  # fmt: skip
    (cli.cwd / "gpu.yaml").write_text(yaml.safe_dump(spec))
    return "gpu.yaml"


def test_second_job_waits_for_gpus_and_names_the_holder(two_gpus: Server, tmp_path: Path) -> None:
    """Service, agent and processes are real; the GPUs are a list, so the ranks are the torch-free ones of ``trainer``."""
    cli = Cli(two_gpus.home, tmp_path)
    python = python_with_fake_answer(tmp_path, fake_rank_command(), torch_cuda=True, torch_version="2.13.0+cu130")
    first = cli("submit", gpu_spec(cli, python, ranks=2, plan={"steps": 100_000, "every": 100_000})).text.strip()
    wait_for(lambda: two_gpus.job(first)["phase"] == "RUNNING", "the first job to run")
    second = cli("submit", gpu_spec(cli, python, ranks=1, plan={"steps": 5})).text.strip()
    wait_for(lambda: first in (two_gpus.job(second)["message"] or ""), "the second to be told why it waits")
    told = cli("get", second).text
    assert "waits for 1 of 2 GPUs" in told and f"({first}) has GPU 0, 1" in told
    cli("cancel", first)
    cli("wait", second)
    assert [a["outcome"] for a in cli("attempts", second, "--json").data] == ["succeeded"]


def test_unavailable_gpus_or_torch_without_cuda_are_refused(two_gpus: Server, tmp_path: Path) -> None:
    cli = Cli(two_gpus.home, tmp_path)
    python = python_with_fake_answer(tmp_path, torch_cuda=True)
    many = cli("submit", gpu_spec(cli, python, ranks=3), expect=5).errors
    assert "3 ranks on CUDA, a GPU for each, and this machine has 2 GPUs: use at most 2 ranks" in many
    blind = python_with_fake_answer(tmp_path, torch_cuda=False)
    said = cli("submit", gpu_spec(cli, blind, ranks=1), expect=5).errors
    assert "built without CUDA" in said and f"{blind} -m pip install torch" in said and "world.device to cpu" in said


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose database, code and jobs each have a small disk (tmpfs) of their own."""
    home = tmp_path / "home"
    mounted: list[Path] = []
    try:
        for place, size in ((home, "6m"), (home / "code", "6m"), (home / "jobs", "16m")):
            place.mkdir()
            if (
                os.geteuid() != 0
                or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place]).returncode
            ):
                pytest.skip("a disk of its own needs root and the right to mount")
            mounted.append(place)
        yield home
    finally:
        for place in reversed(mounted):
            subprocess.run(["umount", "--lazy", place], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(4096))


def test_full_disk_is_reported_and_job_resumes_once_there_is_space(small_disks: Path, tmp_path: Path) -> None:
    """At submission, at a save, in the database: told with figures; nothing half-written stays; with room the job goes on."""
    server = Server(small_disks).start()
    try:
        cli = Cli(server.home, tmp_path)
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "data.bin").write_bytes(os.urandom(8 << 20))
        spec = {"name": "disk", "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 400}},
                "world": {"device": "cpu"}, "resources": {"cpus_per_rank": 1}, "checkpoint": {"every_steps": 20, "keep_last": 2},
                "policy": {"backoff": 0.1, "max_failures": 0}}  # fmt: skip
        (tmp_path / "large.yaml").write_text(yaml.safe_dump({**spec, "code": {"path": "code"}}))
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
        large = cli("submit", "large.yaml", expect=8).errors
        assert f"the disk of {server.home}/code is full" in large and "8.0 MiB needed" in large
        assert not [p for p in (server.home / "code").iterdir() if p.name != ".lock"]

        job = cli("submit", "job.yaml").text.strip()
        wait_for(lambda: server.job(job)["last_checkpoint"], "a checkpoint")
        fill(server.home / "jobs" / "filler")
        said = cli("wait", job, expect=1, deadline=90).errors
        assert "the disk is full" in said and "MiB free" in said and f"ratchet resume {job}" in said
        story = cli("events", job).text
        assert "MiB free" in story and "needed for this file" in story and "checkpoint.keep_last" in story
        (server.home / "jobs" / "filler").unlink()
        ended = cli("submit", "job.yaml").text.strip()
        cli("cancel", ended)
        cli("wait", ended, expect=1)
        assert server.attempts(job)[0]["cause"] == "checkpoint-error"
        assert not list((server.home / "jobs").rglob("*.tmp"))

        fill(server.home / "filler")
        full = cli("submit", "job.yaml", expect=8).errors
        assert f"the disk of {server.home} is full" in full and "nothing was changed" in full
        assert httpx.get(f"{server.url}/readyz").status_code == 507
        cli("delete", ended)  # what the message says to do must itself find room
        cli("get", ended, expect=3)
        assert not server.paths.job(ended).root.exists()
        (server.home / "filler").unlink()
        cli("resume", job)
        wait_for(lambda: (server.attempts(job)[-1]["base"] or {}).get("step"), "a resume from the checkpoint")
        cli("cancel", job)
        cli("wait", job, expect=1)
    finally:
        server.stop()
