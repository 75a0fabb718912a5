"""``ratchet`` watching a job that really trains: followed in a pipe and in a terminal, detached from, waited for."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.support.server import Server

SPEC = """
name: digits-short
task: {entrypoint: "ratchet_worker.tasks.digits:DigitsTask", args: {epochs: 2}}
world: {ranks_per_node: 2, device: cpu}
resources: {cpus_per_rank: 1}
hook: {name: powerSGD, matrix_approximation_rank: 2, start_powerSGD_iter: 10}
checkpoint: {every_steps: 15}
"""
STEPS = 44  # two epochs of 1437 images in batches of 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("cli") / "home")
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return Cli(server.home, tmp_path)


def test_a_job_followed_to_its_end_leaves_everything_to_read(cli: Cli) -> None:
    lines = [
        json.loads(line) for line in cli("submit", "spec.yaml", "--follow", "--json", deadline=120).text.splitlines()
    ]
    job = lines[-1]["job"]
    assert job["phase"] == "SUCCEEDED" and job["progress"]["step"] == STEPS
    assert {next(iter(line)) for line in lines} == {"event", "progress", "job"}
    job_id = job["id"]
    assert cli("wait", job_id).text == ""
    plain = cli("wait", job_id, "--follow").text
    assert f"SUCCEEDED at step {STEPS}/{STEPS}" in plain and "\x1b" not in plain
    hook = cli("hook", job_id).text
    assert "compressing" in hook and "residual norm, rank 1" in hook
    (attempt,) = cli("attempts", job_id, "--json").data
    assert (attempt["cause"], attempt["steps_done"]) == ("completed", STEPS)
    assert "completed" in cli("attempts", job_id).text
    _checkpoints_are_shown_and_verified(cli, job_id)
    _logs_are_shown_and_followed(cli, job_id)


def _checkpoints_are_shown_and_verified(cli: Cli, job_id: str) -> None:
    final = next(c for c in cli("checkpoints", "ls", job_id, "--json").data if c["finished"])
    assert final["step"] == STEPS
    assert cli("checkpoints", "verify", job_id, final["id"]).text.startswith(f"{final['id']}: ok")
    assert cli("checkpoints", "pin", job_id, final["id"], "--json").data["pinned"]
    assert "final,pinned" in cli("checkpoints", "ls", job_id).text
    assert cli("checkpoints", "show", job_id, final["id"], "--json").data["manifest"]["world_size"] == 2
    cli("checkpoints", "verify", job_id, "step-000000000001.a0001", expect=3)


def _logs_are_shown_and_followed(cli: Cli, job_id: str) -> None:
    lines = cli("logs", job_id, "--rank", "0", "--json").data
    assert all((entry["attempt"], entry["rank"]) == (1, 0) for entry in lines)
    followed = cli("logs", job_id, "-f", "--rank", "0", "--json").text.splitlines()
    assert [json.loads(line)["id"] for line in followed] == [entry["id"] for entry in lines]


def test_on_a_terminal_progress_is_drawn_and_ctrl_c_detaches(cli: Cli) -> None:
    arguments = ("submit", "spec.yaml", "--follow", "--set", "task.args.epochs=5000")
    master, slave = pty.openpty()
    environment = {k: v for k, v in cli.environment.items() if k != "COLUMNS"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        cli.command(*arguments), cwd=cli.cwd, env=environment, stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(slave)
    try:
        screen = _read_until(master, b"compressing, iteration", 90.0)
        assert b"\x1b[" in screen and "━".encode() in screen
        os.write(master, b"\x03")
        screen += _read_until(master, b"goes on", 20.0)
        assert process.wait(20) == 130 and b"detached" in screen
    finally:
        process.kill()
        process.wait(10)
        os.close(master)
    job = cli("list", "--phase", "RUNNING", "--json").data[0]
    assert job["id"].encode() in screen
    cli("suspend", job["id"])
    assert cli("wait", job["id"], "--until", "SUSPENDED", "--timeout", "60", "--json").data["phase"] == "SUSPENDED"
    cli("cancel", job["id"])


def _take_terminal() -> None:
    """In the child: make the pty its controlling terminal, so that ^C becomes a signal, and one that is not ignored because
    the tests were started in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.close(os.open(os.ttyname(0), os.O_RDWR))


def _read_until(master: int, wanted: bytes, deadline: float) -> bytes:
    end, got = time.monotonic() + deadline, b""
    while wanted not in got:
        assert time.monotonic() < end, f"waited for {wanted!r}; the terminal shows {got[-2000:]!r}"
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            try:
                got += os.read(master, 65536)
            except OSError:  # the other side is closed
                assert wanted in got, f"ended without {wanted!r}: {got[-2000:]!r}"
    return got
