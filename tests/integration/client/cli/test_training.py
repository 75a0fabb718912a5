"""``ratchet`` watching a job that really trains: followed in a pipe and in a terminal, detached from, waited for."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from safetensors import safe_open

from ratchet_contract.version import RATCHET_VERSION
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.checkpoint_reader import CheckpointReader
from tests.support.cli import Cli
from tests.support.server import Server, wait_for

SPEC = """
name: digits-short
task: {entrypoint: "ratchet_worker.tasks.digits:DigitsTask", args: {epochs: 2}}
world: {ranks_per_node: 2, device: cpu}
resources: {cpus_per_rank: 1}
hook: {name: powerSGD, matrix_approximation_rank: 2, start_powerSGD_iter: 10}
checkpoint: {every_steps: 15}
"""
SLOW = """
import time

from ratchet_worker.tasks.digits import DigitsTask


class Slow(DigitsTask):
    def loss(self, model, batch):
        time.sleep(0.05)  # as a rank waits for its GPU: what looks on needs the cores
        return super().loss(model, batch)
"""
LONG = (
    "--name", "digits-long", "--set", "code.path=./slow", "--set", "task.entrypoint=slow:Slow",
    "--set", "task.args={epochs: 5000, width: 4}", "--set", "checkpoint.every_steps=20",
)  # fmt: skip
STEPS = 44  # two epochs of 1437 images in batches of 64


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return Cli(server.home, tmp_path)


def test_submit_follow_to_success_leaves_metrics_logs_and_checkpoints(cli: Cli, server: Server) -> None:
    lines = [
        json.loads(line) for line in cli("submit", "spec.yaml", "--follow", "--json", deadline=120).text.splitlines()
    ]
    job = lines[-1]["job"]
    assert job["phase"] == "SUCCEEDED" and job["progress"]["step"] == STEPS
    assert {next(iter(line)) for line in lines} == {"event", "progress", "job"}
    job_id = job["id"]
    assert cli("wait", job_id).text == ""
    told = cli("wait", job_id, "--follow")
    assert f"SUCCEEDED, step {STEPS}/{STEPS}" in told.text and "\x1b" not in told.text
    assert "last metrics: " in told.errors and "loss " in told.errors
    assert f"ratchet checkpoints export {job_id} -o model.safetensors" in told.errors
    hook = cli("hook", job_id).text
    assert "compressing" in hook and re.search(r"residual norm, rank 1 +\d[\d.e-]{0,6}$", hook, re.MULTILINE)
    assert re.search(r"bytes, one step +[\d.]+ KiB -> [\d.]+ (KiB|B)$", hook, re.MULTILINE)
    _metrics_are_shown(cli, job_id)
    _history_is_folded(cli, job_id)
    (attempt,) = cli("attempts", job_id, "--json").data
    assert (attempt["cause"], attempt["steps_done"]) == ("completed", STEPS)
    table = cli("attempts", job_id)
    assert "completed" in table.text and all(f"{c} " in table.errors for c in ("BASE", "LAST", "DONE", "LOST"))
    environment = cli("get", job_id, "--json").data["environment"]
    assert f"torch=={version('torch')}" in environment["packages"] and environment["ratchet"] == RATCHET_VERSION
    assert f"{len(environment['packages'])}, digest {environment['digest'][:16]}" in cli("get", job_id).text
    assert server.call("GET", f"/v1/jobs/{job_id}/attempts/1").json()["environment"] == environment
    watched = cli("hook", job_id, "--watch")
    assert "compressing" in watched.text and len(watched.text.splitlines()) == 1 and "SUCCEEDED" in watched.errors
    _checkpoints_are_shown_and_verified(cli, server, job_id)
    _logs_are_shown_and_followed(cli, server, job_id)
    _what_has_trained_to_its_end_goes_on_as_the_hint_says(cli, job_id)


def _what_has_trained_to_its_end_goes_on_as_the_hint_says(cli: Cli, job_id: str) -> None:
    hint = cli("resume", job_id, expect=4).errors.partition("next: ")[2]
    assert f"`ratchet fork {job_id} --checkpoint ID`" in hint and f"`ratchet checkpoints ls {job_id}`" in hint
    earlier = min(cli("checkpoints", "ls", job_id, "--json").data, key=lambda one: one["step"])["id"]
    fork = cli("fork", job_id, "--checkpoint", earlier).text.strip()
    assert "SUCCEEDED" in cli("wait", fork, "--follow", deadline=120).text
    pointless = cli("fork", job_id, expect=4).errors
    assert "has all 44 steps" in pointless and f"`ratchet fork {job_id} --checkpoint {earlier}`" in pointless


def _history_is_folded(cli: Cli, job_id: str) -> None:
    each = cli("events", job_id, "--all").text.splitlines()
    assert len(each) == len(cli("events", job_id, "--json").data)
    assert {line.split()[1] for line in each} >= {"result", "attempt-ended", "end-succeeded"}
    for arguments in ((), ("-f",)):
        lines = cli("events", job_id, *arguments).text.splitlines()
        *begun, saved = [line for line in lines if " checkpoint " in line]
        assert "checkpoints from step 1 on, newest: step-000000000044.a0001" in saved
        assert len(begun) == len(arguments), "who follows sees the first when it comes"
        assert lines[-1].endswith("attempt 1 ended: completed: all ranks completed; the job is SUCCEEDED")
        assert not [line for line in lines if line.split()[1] in ("result", "end-succeeded")]


def _metrics_are_shown(cli: Cli, job_id: str) -> None:
    header, *rows = cli("metrics", job_id).text.splitlines()
    assert header.split() == ["NAME", "LAST", "AT", "STEP", "COURSE"]
    [loss] = [row.split() for row in rows if row.startswith("loss ")]
    curve = cli("metrics", job_id, "loss").text.splitlines()[1:]
    assert len(curve) == STEPS and curve[-1].split() == [loss[2], "1", loss[1]]
    assert f"loss {float(loss[1]):.4g}" in cli("get", job_id).text
    assert "lists the names" in cli("metrics", job_id, "nothing").errors


def _checkpoints_are_shown_and_verified(cli: Cli, server: Server, job_id: str) -> None:
    final = next(c for c in cli("checkpoints", "ls", job_id, "--json").data if c["finished"])
    assert final["step"] == STEPS
    assert cli("checkpoints", "verify", job_id, final["id"]).text.startswith(f"{final['id']}: ok")
    assert cli("checkpoints", "pin", job_id, final["id"], "--json").data["pinned"]
    assert "final,pinned" in cli("checkpoints", "ls", job_id).text
    assert cli("checkpoints", "show", job_id, final["id"], "--json").data["manifest"]["world_size"] == 2
    assert "checkpoints ls" in cli("checkpoints", "verify", job_id, "step-000000000002.a0001", expect=3).errors
    assert (final["hook_iteration"] or 0) > 0 and "SAVE TIME" in cli("checkpoints", "ls", job_id).text
    _checkpoints_are_exported(cli, server, job_id, final["id"])
    _a_job_starts_from_what_was_exported(cli)
    _damage_is_found_among_all(cli, server, job_id)


def _checkpoints_are_exported(cli: Cli, server: Server, job_id: str, final: str) -> None:
    told = cli("checkpoints", "export", job_id, "-o", "model.safetensors")
    assert (told.text, final in told.errors) == ("model.safetensors\n", True)
    manifest = read_manifest(server.paths.job(job_id).checkpoints / final)
    stored = CheckpointReader(server.paths.job(job_id).checkpoints / final).tensors("shared/model/")
    with safe_open(cli.cwd / "model.safetensors", "np") as file:
        for name, tensor in stored.items():
            assert file.get_tensor(name.removeprefix("shared/model/")).tobytes() == bytes(tensor.data)
        assert json.loads(file.metadata()["ratchet"])["checkpoint_digest"] == manifest.digest
    assert "already exists" in cli("checkpoints", "export", job_id, "-o", "model.safetensors", expect=5).errors
    step = str(manifest.parent.step)
    cli("checkpoints", "export", job_id, "--step", step, "--format", "torch", "-o", "ranks")
    assert sorted(p.name for p in (cli.cwd / "ranks").iterdir()) == [f"rank-0000{r}-of-00002.pt" for r in range(2)]
    assert "checkpoints ls" in cli("checkpoints", "export", job_id, "--step", "999", "-o", "x", expect=3).errors
    broken = server.paths.job(job_id).checkpoints / final / "rank-00000-of-00002.safetensors"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1])
    assert "the manifest says" in cli("checkpoints", "export", job_id, "-o", "x", expect=4).errors
    broken.write_bytes(whole)
    assert {p.name for p in cli.cwd.iterdir()} == {
        "spec.yaml",
        "model.safetensors",
        "ranks",
    }  # and nothing half written


def _a_job_starts_from_what_was_exported(cli: Cli) -> None:
    begun = ("submit", "spec.yaml", "--name", "begun", "--set", "world.ranks_per_node=1", "--set", "hook=allreduce")
    (cli.cwd / "hostile.safetensors").write_bytes((1 << 62).to_bytes(8, "little"))
    told = cli(*begun, "--import", "hostile.safetensors", expect=5)
    assert "/start_from/path" in told.errors and "header's length" in told.errors
    assert "no file" in cli(*begun, "--import", "none.pt", "--dry-run", expect=5).errors
    ranks = cli.cwd / "ranks" / "rank-00000-of-00002.pt"
    given = ("--import", str(ranks), "--set", "start_from.optimizer=true", "--set", "task.args={steps: 1}")
    job_id = cli(*begun, *given, "--wait", deadline=120).text.strip()
    (attempt,) = cli("attempts", job_id, "--json").data
    told = {c["component"]: c["status"] for c in attempt["resume_report"]["components"]}
    assert (told["model"], told["optimizer"], told["hook"]) == ("imported", "imported", "absent")
    copied = cli("get", job_id, "--json").data["resolved"]["start_digest"]
    ranks.unlink()
    # From the checkpoint: the file is neither needed nor copied. It still trains when it is cancelled.
    fork = cli("fork", job_id, "--set", "task.args={steps: 1000000}", "--json").data
    assert (fork["resolved"]["start_digest"], len(copied)) == (None, 64)
    cli("cancel", fork["id"])


def _damage_is_found_among_all(cli: Cli, server: Server, job_id: str) -> None:
    whole = cli("checkpoints", "verify", job_id).text.splitlines()
    assert len(whole) >= 2 and all(": ok (" in line for line in whole)
    newest, older = whole[0].split(":")[0], whole[1].split(":")[0]
    file = next((server.paths.job(job_id).checkpoints / older).glob("rank-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    found = cli("checkpoints", "verify", job_id, "--json", expect=1)
    assert {r["id"]: r["verification"] for r in found.data} | {older: "damaged", newest: "ok"} == {
        r["id"]: r["verification"] for r in found.data
    }
    assert older in found.errors and "1 of them set aside" in found.errors and "falls back" in found.errors
    folder = server.paths.job(job_id)
    assert f"{older}: DAMAGED" in cli("checkpoints", "verify", str(folder.quarantine), expect=1).text
    offline = cli("checkpoints", "verify", str(folder.checkpoints), "--json").text.splitlines()
    assert {json.loads(line)["status"] for line in offline} == {"ok"} and len(offline) == len(whole) - 1
    dry = cli("checkpoints", "prune", job_id, "--dry-run", "--quarantined")
    assert dry.text == f"{older}\n" and dry.errors.startswith("1 would be removed")
    assert cli("checkpoints", "prune", job_id, "--quarantined", "--json").data["quarantined"] == [older]


def _logs_are_shown_and_followed(cli: Cli, server: Server, job_id: str) -> None:
    for rank, words in ((0, "alpha\nbeta\ngamma\n"), (1, "alpha\n")):
        with server.paths.job(job_id).attempt(1).log(rank).open("a") as log:
            log.write(words)
    for more in ((), ("-f",)):

        def told(*options: str, more: tuple[str, ...] = more) -> list[str]:
            return cli("logs", job_id, *more, *options).text.splitlines()

        assert told("--rank", "0", "--tail", "2") == ["1.0 | beta", "1.0 | gamma"]
        assert told("--grep", "alp", "--attempt", "1", "--since", "1h") == ["1.0 | alpha", "1.1 | alpha"]
        assert told("--since", "2999-01-01T00:00:00Z") == []
    assert "ratchet attempts" in cli("logs", job_id, "--attempt", "7", expect=3).errors
    lines = cli("logs", job_id, "--rank", "0", "--json").data
    assert all((entry["attempt"], entry["rank"]) == (1, 0) for entry in lines)
    followed = cli("logs", job_id, "-f", "--rank", "0", "--json").text.splitlines()
    assert [json.loads(line)["id"] for line in followed] == [entry["id"] for entry in lines]


def test_wait_follow_on_a_terminal_survives_a_service_restart(cli: Cli, server: Server) -> None:
    (cli.cwd / "slow").mkdir()
    (cli.cwd / "slow" / "slow.py").write_text(SLOW)
    with cli.terminal("submit", "spec.yaml", "--follow", *LONG) as terminal:
        terminal.read_until("compressing, iteration")
        terminal.read_until("steps/s")
        assert "━" in terminal.text and "\x1b[" in terminal.raw and terminal.longest_line_length <= 80
        terminal.write("\x03")
        assert terminal.end() == 130 and "detached" in terminal.text and "continues" in terminal.text
    (job,) = cli("list", "--active", "--json").data
    assert job["id"] in terminal.text
    wait_for(lambda: server.job(job["id"])["last_checkpoint"], "a checkpoint")
    _top_shows_what_is_going_on(cli)
    _hook_is_watched(cli)
    with cli.terminal("wait", "digits-long", "--follow", columns=40) as terminal:
        terminal.read_until("compressing")
        server.kill()
        terminal.read_until("Retrying")
        server.start()
        terminal.discard_output()
        terminal.read_until("left")
        assert terminal.longest_line_length <= 40
        terminal.write("\x03")
        assert terminal.end() == 130
    cli("suspend", job["id"])
    assert cli("wait", job["id"], "--until", "SUSPENDED", "--timeout", "60", "--json").data["phase"] == "SUSPENDED"
    assert cli("get", job["id"], "--json").data["progress"]["steps_per_second"] is None
    cli("cancel", job["id"])


def _top_shows_what_is_going_on(cli: Cli) -> None:
    (seen,) = cli("top", "--once", "--json").data["jobs"]
    assert seen["phase"] == "RUNNING" and seen["steps_per_second"] > 0 and seen["eta_seconds"] > 0 and seen["loss"] > 0
    assert seen["checkpoint"] and seen["checkpoint_at"] and seen["hook_phase"] == "compressing"
    with cli.terminal("top", "--every", "0.2", columns=40) as terminal:
        terminal.read_until("RUNNING")
        assert terminal.longest_line_length <= 40 and seen["id"] in terminal.text
        terminal.write("\x03")
        assert terminal.end() == 130
    piped = subprocess.run(
        f"{cli.command()[0]} top --every 0.2 | head -n 5", shell=True, env=cli.environment, cwd=cli.cwd,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert piped.stdout.count("STEPS/S") >= 2 and piped.stderr == "" and "\x1b" not in piped.stdout


def _hook_is_watched(cli: Cli) -> None:
    with cli.terminal("hook", "digits-long", "--watch", columns=40) as terminal:
        terminal.read_until("RESIDUAL")
        assert terminal.longest_line_length <= 40
        terminal.write("\x03")
        assert terminal.end() == 130
    command = cli.command("hook", "digits-long", "--watch", "--json")
    with subprocess.Popen(command, env=cli.environment, cwd=cli.cwd, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = (json.loads(line) for line in process.stdout)
        first = next(lines)
        second = next(
            line for line in lines if line["iteration"] != first["iteration"]
        )  # a line may be of one rank's change
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(20) == 130
    assert second["iteration"] > first["iteration"] and set(second["residual_norm"]) == {"0", "1"}
