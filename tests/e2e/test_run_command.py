"""``ratchet run`` as a person uses it: streams, exit codes, kills of ranks and of the command itself, and going on afterwards."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ratchet_client.cli.run.private_service import RunService
from ratchet_client.cli.shared.service_process import without_ratchet_variables
from ratchet_client.resources.client import RatchetClient
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.phases import JobPhase
from ratchet_contract.processes import service_pointers
from ratchet_contract.protocol.messages import ServiceFile
from tests.support.agent_host import APART
from tests.support.cli import EXECUTABLE, FORKS, Cli
from tests.support.fork_server import RANKS, SERVICES
from tests.support.forked_cli import Command
from tests.support.full_matrix import full
from tests.support.server import Server, processes_below, rank_pid, wait_for

# Slow until the file `hurry` is beside the script, so that what interrupts it comes in time on any machine.
TRAIN = """
import hashlib
import sys
import time
from pathlib import Path

import torch

from ratchet_worker.session import Session

hurry = Path(sys.argv[1])
with Session() as s:
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 8)
    model = s.wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    s.register(optimizer=optimizer)
    if s.step == 0:
        s.restore()
    for step in s.steps(300):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if s.rank == 0:
            print("step", step, flush=True)
        if not hurry.exists():
            time.sleep(0.2)
    if s.rank == 0:
        print("weights", hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
        Path("result.txt").write_text("done")
"""
UNUSED = """
def unused():  # `ratchet init` reads a device in it
    torch.distributed.init_process_group("gloo")
"""
MADE = "# torchrun train.py, as a job of Ratchet: made by\n# `ratchet init`. Every key: docs/spec.md.\nname: train\n"
WEIGHTS = re.compile(r"^weights (\w+)$", re.MULTILINE)
EVERY = ("--set", "checkpoint.every_steps=10", "--set", "policy.backoff=0.05")


@dataclass
class Running:
    """A ``ratchet run`` in ``folder``, its streams in files."""

    folder: Path
    process: subprocess.Popen[bytes] | Command
    out: Path
    err: Path

    @property
    def home(self) -> Path:
        return self.folder / ".ratchet"

    def steps(self) -> list[int]:
        return [int(text) for text in re.findall(r"^step (\d+)$", self.out.read_text(), re.MULTILINE)]

    def wait_step(self, step: int) -> None:
        self.wait_for(lambda: self.steps()[-1:] >= [step], f"step {step}")

    def wait_said(self, text: str) -> None:
        self.wait_for(lambda: text in self.err.read_text(), text)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(lambda: condition() or self.process.poll() is not None, what, 120)
        assert condition(), f"it ended before {what}: {self.err.read_text()}"

    def ended(self) -> int:
        """Its exit code; nothing of it is left."""
        code = self.process.wait(240)
        assert processes_below(self.home) == [], self.err.read_text()
        return code


def variables(**more: str) -> dict[str, str]:
    return without_ratchet_variables(os.environ) | more


@contextmanager
def run(folder: Path, *arguments: str, streams: tuple[Path, Path] | None = None, **more: str) -> Iterator[Running]:
    """``streams``: files for the output and the errors, else new ones in ``folder``. ``more``: variables. The command, its
    service, agents and ranks are forked where these leave that as it is."""
    env = variables(**more)
    number = len(list(folder.glob("out-*")))
    out, err = streams or (folder / f"out-{number}", folder / f"err-{number}")
    process: subprocess.Popen[bytes] | Command
    with out.open("ab") as one, err.open("ab") as two, Path(os.devnull).open("rb") as none:
        if FORKS.can_fork(env):
            RANKS.wait_ready()
            streams = [none.fileno(), one.fileno(), two.fileno()]
            addresses = SERVICES.address, RANKS.address
            process = FORKS.start(["run", *arguments], streams, cwd=folder, env=env, services=addresses)
        else:
            command = [str(EXECUTABLE), "run", *arguments]
            process = subprocess.Popen(command, cwd=folder, env=env, stdin=none, stdout=one, stderr=two)
    running = Running(folder, process, out, err)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        for pid in processes_below(running.home):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def job_paths(running: Running) -> JobPaths:
    (found,) = running.home.glob("run/train-*/jobs/job-*")
    return JobPaths(found)


def service_pid(running: Running) -> int:
    (found,) = running.home.glob("run/train-*/service.json")
    return ServiceFile.model_validate_json(found.read_bytes()).pid


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that an undisturbed run prints, with all that the command tells then."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(TRAIN)
    (folder / "hurry").touch()
    with run(folder, "--nproc", "2", *EVERY, "-o", "results", "train.py", str(folder / "hurry")) as running:
        assert running.ended() == 0, running.err.read_text()
        (digest,) = WEIGHTS.findall(running.out.read_text())
        assert running.out.read_text() == "".join(f"step {n}\n" for n in range(300)) + f"weights {digest}\n"
        said = running.err.read_text()
    model = re.search(r"^model: (\S+)$", said, re.MULTILINE)
    outputs = re.search(r"^outputs: result.txt \(4 B\), in (\S+)$", said, re.MULTILINE)
    assert model is not None and (folder / model[1] / "MANIFEST.json").is_file()
    assert outputs is not None and (folder / outputs[1] / "result.txt").read_text() == "done"
    assert (folder / "results" / "result.txt").read_text() == "done"
    proof, copied = said.splitlines()[-2:]
    assert copied == "copied: results/result.txt"
    prepares, proves = proof.partition("killed? ratchet ")[2].split(" | ratchet ")
    assert proves == "--home .ratchet prove -"
    spec = yaml.safe_load(Cli(folder / ".ratchet", folder)(*shlex.split(prepares)).text)
    assert spec["world"]["ranks_per_node"] == 2 and spec["checkpoint"]["every_steps"] == 10
    return digest


def project(folder: Path) -> tuple[str, ...]:
    """The arguments of a slow run in ``folder``."""
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(TRAIN)
    return ("torchrun", "--nproc-per-node=2", "code/train.py", str(folder / "hurry"))


def test_run_resumes_exactly_after_rank_kill_service_kill_and_interrupt(undisturbed: str, tmp_path: Path) -> None:
    command = project(tmp_path)
    streams = tmp_path / "code" / "o", tmp_path / "code" / "e"  # beside the script, and no code
    with run(tmp_path, *EVERY, *command, streams=streams, HOME="/proc") as running:  # a HOME that nobody can write to
        running.wait_step(3)
        os.kill(service_pid(running), signal.SIGKILL)
        running.wait_said("the service of this command ended: restarting it")
        running.wait_step(12)
        killed = rank_pid(job_paths(running).attempt(1), 1)
        os.kill(killed, signal.SIGKILL)
        running.wait_said("attempt 1 ended: rank-killed")
        first = len(running.steps())
        running.wait_for(lambda: len(running.steps()) > first + 3, "steps of attempt 2")
        running.process.send_signal(signal.SIGTERM)
        assert running.ended() == 130, running.err.read_text()
        assert "SUSPENDED" in running.err.read_text() and "the same command continues" in running.err.read_text()
        before, printed = running.steps(), len(running.out.read_text())
    (tmp_path / "hurry").touch()
    for name, text in (
        ("notes.txt", "lr 0.01"),
        (".ratchetignore", "notes.txt\n"),
        ("slurm-7.out", "begun"),
        ("train.yaml", MADE),
    ):
        (tmp_path / "code" / name).write_text(text)  # none of them is code
    with run(tmp_path, *EVERY, *command, streams=streams) as again:
        assert again.ended() == 0, again.err.read_text()
        after, text = again.steps()[len(before) :], again.out.read_text()[printed:]
        said = re.search(r"continuing job-\w+ from step (\d+); --new starts another", again.err.read_text())
        assert re.search(
            r"^resumes: attempt 2 exact, proved \(\d+ of \d+ redone steps?\), ", again.err.read_text(), re.M
        )
    assert said is not None and after == list(range(int(said[1]), 300)) and max(before) == after[0] - 1
    assert set(before) | set(after) == set(range(300)), "what was printed just before the stop is shown, too"
    assert WEIGHTS.findall(text) == [undisturbed]


@full
def test_blocked_terminal_does_not_delay_the_stop(tmp_path: Path) -> None:
    """As by Ctrl-S, or a pager that stands. Two attempts end meanwhile: the command cannot tell of either."""
    (tmp_path / "train.py").write_text(TRAIN.replace('print("step", step', 'print("step", step, "x" * 100_000'))
    command = [str(EXECUTABLE), "run", *EVERY, "train.py", str(tmp_path / "hurry")]
    process = subprocess.Popen(command, cwd=tmp_path, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        running = Running(tmp_path, process, tmp_path / "out", tmp_path / "err")
        (log,) = wait_for(lambda: [*tmp_path.glob(".ratchet/run/*/jobs/*/attempts/*/logs/rank-*.log")], "a log", 120)
        wait_for(lambda: log.stat().st_size > 500_000, "more output than a pipe holds", 120)
        for attempt in (1, 2):
            ended = job_paths(running).attempt(attempt)
            os.kill(rank_pid(ended, 0), signal.SIGKILL)
            wait_for(ended.result_file.exists, f"the end of attempt {attempt}", 60)
            log = job_paths(running).attempt(attempt + 1).log(0)
            wait_for(lambda log=log: log.exists() and log.stat().st_size > 500_000, "steps of the next attempt", 120)
        process.send_signal(signal.SIGINT)
        control = job_paths(running).attempt(3).control_file
        wait_for(lambda: control.exists() and '"run"' not in control.read_text(), "the job to be told to stop", 60)
        assert b"stopping after a checkpoint" in process.communicate(timeout=120)[1]
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
        for pid in processes_below(tmp_path / ".ratchet"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_killed_run_command_leaves_no_process_and_resumes(undisturbed: str, tmp_path: Path) -> None:
    command = project(tmp_path)
    with run(tmp_path, *EVERY, *command) as running:
        running.wait_step(12)
        running.process.kill()
        wait_for(lambda: not processes_below(running.home), "the end of service, agent and ranks", 120)
        (tmp_path / "code" / "train.py").write_text(TRAIN + UNUSED)
        (tmp_path / "code" / "notes.txt").write_text("lr 0.01")
        with run(tmp_path, *EVERY, *command) as stopped:
            stopped.wait_for(lambda: bool(stopped.steps()), "a step")
            stopped.process.send_signal(signal.SIGHUP)  # its terminal is closed
            assert stopped.ended() == 130, stopped.err.read_text()
            said = stopped.err.read_text()
            assert re.search(r"continuing job-\w+ from step \d+, with the code as it is now", said), said
            assert "(notes.txt, train.py changed): not exact" in said
            assert "files that are not code (notes.txt) can be listed in .ratchetignore" in said
            assert (
                'keeps its spec, and a new job of this command would have another: world.device ("auto", now "cpu")'
                in said
            )
            assert "SUSPENDED" in said and re.search(r"^not exact: attempt \d+ may have other bits", said, re.M), said
        (tmp_path / "hurry").touch()
        with run(tmp_path, *EVERY, *command) as again:
            assert again.ended() == 0, again.err.read_text()
            assert again.steps()[-1] == 299 and again.steps()[0] > 10
            assert WEIGHTS.findall(again.out.read_text()) == [undisturbed]


PLAIN = """
import os
import signal
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", os.environ["RANK"], flush=True)
if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "1":
    raise RuntimeError("no luck")
while True:
    time.sleep(0.05)
"""


def test_second_signal_kills_the_script_and_a_failure_gives_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (tmp_path / "plain.py").write_text(PLAIN)
    with run(tmp_path, "--ranks", "all", "--nproc", "2", "plain.py") as running:
        running.wait_for(
            lambda: sorted(running.out.read_text().splitlines()) == ["1.0 | begun 0", "1.1 | begun 1"], "output"
        )
        assert service_pointers.running_services() == [], "no other command finds it"
        again = [str(EXECUTABLE), "run", "--ranks", "all", "--nproc", "2", "plain.py"]
        twin = subprocess.run(again, cwd=tmp_path, env=variables(), capture_output=True, text=True, timeout=60)
        assert twin.returncode == 5 and "the same command is already running" in twin.stderr
        assert "restarting it" not in running.err.read_text(), "its service goes on"
        running.process.send_signal(signal.SIGINT)
        running.wait_said("a second Ctrl-C ends it at once")
        running.process.send_signal(signal.SIGINT)
        assert running.ended() == 130
    with run(tmp_path, "--nproc", "2", "--set", "policy.max_failures=0", "plain.py", "fail") as failing:
        assert failing.ended() == 1
        said = failing.err.read_text()
        assert failing.out.read_text().startswith("begun 0\n") and "no luck" not in failing.out.read_text()
        assert "1.1 | RuntimeError: no luck" in said.splitlines()
        assert "unfinished, of another command: ratchet run --ranks all --nproc 2 plain.py" in said.splitlines()
        assert "Fix its cause; then the same command." in said and "ratchet resume" not in said
    (tmp_path / "wanting.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    with run(tmp_path, "wanting.py", "--nproc=2") as refused:
        assert refused.ended() == 1
        said = refused.err.read_text()
        assert said.count("the script does not take its arguments: unrecognized arguments: --nproc=2") == 1
        assert "attempt 2" not in said and "options of `ratchet run` come before it" in said


def test_killed_service_is_restarted_before_its_process_is_reaped(tmp_path: Path) -> None:
    """Its port is closed some time before, on a busy machine for seconds: ``sleep`` stands for it meanwhile."""
    service = RunService(HomePaths(tmp_path / "home"), private=True)
    service.paths.home.mkdir(mode=0o700)
    try:
        service.start()
        assert service._process is not None
        service._process.kill()
        service._process.wait()
        service._process = subprocess.Popen(["sleep", "1"])
        assert service.restart_if_ended()
        with RatchetClient(home=service.paths.home) as client:
            assert client.ready()
    finally:
        service.stop()


def test_second_concurrent_equal_run_command_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    with run(tmp_path, "plain.py") as one, run(tmp_path, "plain.py") as other:
        wait_for(lambda: {one.process.poll(), other.process.poll()} != {None}, "the end of one of them", 60)
        refused, trains = (one, other) if one.process.poll() is not None else (other, one)
        assert refused.process.returncode == 5, refused.err.read_text()
        assert "the same command is already running" in refused.err.read_text()
        trains.wait_for(lambda: "begun 0" in trains.out.read_text(), "its output")
        trains.process.kill()


WITH_TRAINER = """
import time

def train():
    import lightning
    lightning.Trainer(accelerator="cpu", devices=1)

print("begun", flush=True)
while True:
    time.sleep(0.05)
"""


def test_same_command_continues_its_job_after_a_change_of_lightning_devices(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(WITH_TRAINER)
    with run(tmp_path, "plain.py") as first:
        first.wait_for(lambda: "begun" in first.out.read_text(), "its output")
        first.process.send_signal(signal.SIGTERM)
        assert first.ended() == 130
    script.write_text(WITH_TRAINER.replace("devices=1", "devices=2"))
    with run(tmp_path, "plain.py") as again:
        again.wait_for(lambda: "begun" in again.out.read_text(), "its output")
        said = again.err.read_text()
    assert re.search(r"^continuing job-\w+ from its beginning, with the code as it is now", said, re.MULTILINE), said
    assert "a new job of this command would have another: world.ranks_per_node (1, now 2)" in said
    assert "of another command" not in said


def test_run_uses_a_service_that_serves_the_run_directory(server: Server, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('all is well')\n")
    with run(tmp_path, "plain.py", RATCHET_HOME=str(server.home)) as running:
        assert running.process.wait(120) == 0, running.err.read_text()
    assert running.out.read_text() == "all is well\n"
    assert f"using the service of {server.home}" in running.err.read_text() and not running.home.exists()


def test_private_service_ignores_variables_that_configure_another_service(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('all is well')\n")
    other = {"RATCHET_DATABASE_URL": f"sqlite:///{tmp_path}/other.db", "RATCHET_AUTH": "token"}
    with run(tmp_path, "plain.py", **other) as running:
        assert running.ended() == 0, running.err.read_text()
    assert running.out.read_text() == "all is well\n" and not (tmp_path / "other.db").exists()


def test_second_signal_with_a_shared_service_ends_the_command_and_the_job_still_saves(
    server: Server, tmp_path: Path
) -> None:
    # half a minute of steps after the file, within which the stop request reaches the ranks
    waits = "time.sleep(0.1)\n        while not hurry.exists():"
    (tmp_path / "train.py").write_text(TRAIN.replace("if not hurry.exists():", waits))
    with run(tmp_path, "train.py", str(tmp_path / "hurry"), RATCHET_HOME=str(server.home)) as running:
        running.wait_step(0)
        running.process.send_signal(signal.SIGINT)
        running.wait_said("a second Ctrl-C ends only this command")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 130
    said = running.err.read_text()
    assert "its service stops the job after a checkpoint" in said and "at once" not in said, said
    (tmp_path / "hurry").touch()
    with RatchetClient(server.url) as client:
        (job,) = [job for job in client.jobs() if job.name == "train"]
        stopped = client.wait(job.id, until=[JobPhase.SUSPENDED])
        assert stopped.phase is JobPhase.SUSPENDED and stopped.last_checkpoint is not None


def test_dashed_arguments_after_the_script_are_passed_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint(sys.argv[1:])\n")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    dashed = ["--nproc", "3", "--new", "--", "--lr=-0.1", "-v"]
    with run(tmp_path, "plain.py", *dashed, **slurm) as running:
        assert running.ended() == 0, running.err.read_text()
    assert running.out.read_text() == f"{dashed}\n"
    assert re.search(r"^details: .* logs job-\w+$", running.err.read_text(), re.MULTILINE), "it has no checkpoint"
    assert "this allocation has 2 nodes, and `ratchet run` trains on this one alone" in running.err.read_text()


@full
@pytest.mark.skipif(not APART, reason="needs the right to make a PID namespace")
def test_plain_script_runs_as_first_process_of_a_namespace(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint(sys.argv[1:])\n")
    first = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        str(EXECUTABLE),
        "run",
        "--name",
        "first",
        "plain.py",
    ]
    done = subprocess.run(first, cwd=tmp_path, env=variables(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_invalid_run_arguments_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: ../elsewhere\nscript: [train.py]\nworld: {ranks_per_node: none}\n")
    cli = Cli(tmp_path / "home", tmp_path)
    refused = cli("run", "spec.yaml", expect=5).errors
    assert "/name" in refused and "/world/ranks_per_node" in refused
    assert "a spec contains the script's arguments: leave out --lr 1" in " ".join(
        cli("run", "spec.yaml", "--lr", "1", expect=2).errors.split()
    )
    (tmp_path / "plain.py").write_text("")
    assert "has 1 rank, numbered from 0" in " ".join(cli("run", "--ranks", "1", "plain.py", expect=2).errors.split())
    mistyped = " ".join(cli("run", "--nprc", "2", "plain.py", expect=5).errors.split())
    assert "--nprc" in mistyped and "ratchet's own options come first" in mistyped
    assert "does not exist: create it first" in cli("run", "-o", "a/b", "plain.py", expect=5).errors
    assert "looked in" in cli("run", "absent.py", expect=3).errors and not (tmp_path / "home").exists()
