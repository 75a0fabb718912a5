"""Scripts without a Session, and with one where nobody looks for it: what the rank makes of each, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract import env_vars as names
from ratchet_contract.exit_codes import EXIT_PREEMPTED, EXIT_USER_ERROR, exit_code_of
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.messages import RankResult
from tests.support.launch import Attempt, Job
from tests.support.server import wait_for

NESTED = """
import torch
from ratchet_worker.session import Session
with Session() as s:
    net = torch.nn.Linear(2, 1)
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    s.register(optimizer=optimizer)
    {outer}:
        for step in s.steps({total}):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
FILES = {
    # A Session in a module that is imported: managed from the moment it is made, under a second one too.
    "late.py": "import lib.inner\n",
    "lib/inner.py": """
import torch
from ratchet_worker.session import Session
s = Session()
assert Session().world_size == 1
net = torch.nn.Linear(2, 1)
model = s.wrap(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
s.register(optimizer=optimizer)
for step in s.steps(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    # A second loop behind the first one's end: a resume from the final checkpoint would leave it out.
    "phases.py": NESTED.format(outer="for total in (1, 2)", total="total"),
    # The usual shape of a loop without Ratchet: its second and third epoch ask for no step that was not done.
    "epochs.py": NESTED.format(outer="for epoch in range(3)", total="2"),
    # A file of its own, a group that torch makes by itself, one that is not left.
    "alone.py": """
import os, sys
from pathlib import Path
assert Path(__file__).parent != Path.cwd() and sys.path[0] == str(Path(__file__).parent)
Path("data/kept.txt").write_text(Path("data/in.txt").read_text())
for stale in ("random.py", "lib_of_mine.py"):
    Path(stale).write_text("raise RuntimeError('imported from the current directory')")
import lib_of_mine
import torch
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,))
all_reduce(torch.ones(1))
destroy_process_group()
init_process_group()
sys.exit(0)
""",
    "lib_of_mine.py": "",
    "data/in.txt": "in",
    "missing.py": "import lib.needs\n",
    "lib/needs.py": "import a_module_that_nobody_has\n",
    "before.py": """
import torch.distributed as dist
from ratchet_worker.session import Session
dist.init_process_group("gloo")
Session()
""",
    "arguments.py": """
import argparse
from ratchet_worker.session import Session
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.parse_args()
""",
    "its_own.py": """
import argparse
from ratchet_worker.session import Session
parser = argparse.ArgumentParser()
parser.parse_args()
parser.error("the data is not mounted here")
""",
    "none.py": "import ratchet_worker\nprint('no Session')\n",
    "stdout_closed.py": "import sys\nsys.stdout.close()\nsys.exit(65)\n",
    "stderr_closed.py": "import sys\nsys.stderr.close()\nsys.exit(65)\n",
    "no_streams.py": "import sys\nsys.stdout = sys.stderr = None\nsys.exit(65)\n",
    "waits.py": """
import sys, time
from pathlib import Path
sys.stdout.close()
Path("begun").touch()
time.sleep(60)
""",
    # Its log is on a full disk when it handles the stop.
    "full.py": """
import os, signal, time
from pathlib import Path
def stop(*_):
    raise ValueError("cannot be saved")
signal.signal(signal.SIGTERM, stop)
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
Path("begun").touch()
time.sleep(60)
""",
}


class Home:
    """One project; jobs of one rank."""

    def __init__(self, path: Path) -> None:
        self.path, self.code = path, path / "project"
        for name, text in FILES.items():
            (self.code / name).parent.mkdir(parents=True, exist_ok=True)
            (self.code / name).write_text(text)
        self.jobs: list[Job] = []

    def launch(self, script: str, **more: str) -> Attempt:
        world = {"ranks_per_node": 1, "device": "cpu"}
        spec = {"script": [script], "code": {"path": str(self.code)}, "world": world, **more}
        self.jobs.append(Job(self.path, spec, self.code, job_id=script.removesuffix(".py")))
        return self.jobs[-1].launch()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    for job in made.jobs:
        job.close()


def verdicts(attempt: Attempt) -> list[str]:
    return [m.report.verdict for m in attempt.messages(kind="resumed")]


def notes(attempt: Attempt) -> list[str]:
    return [m.type for m in attempt.messages(kind="note")]


def test_scripts_with_late_session_or_without_one_complete(home: Home) -> None:
    late, alone = (home.launch(f"{name}.py") for name in ("late", "alone"))
    assert late.wait().cause is Cause.COMPLETED, late.logs()
    assert verdicts(late) == ["unmanaged", "fresh"] and late.base() is not None
    assert home.jobs[0].newest().name == "step-000000000003.a0001" and notes(late) == []

    assert alone.wait().cause is Cause.COMPLETED, alone.logs()
    assert '"torch==' in alone.paths.environment_file.read_text()
    assert verdicts(alone) == ["unmanaged"] and alone.base() is None and alone.messages(kind="training") == []
    assert (home.jobs[1].paths.work_dir / "data" / "kept.txt").read_text() == "in"
    assert not (home.code / "data" / "kept.txt").exists()
    again = home.jobs[1].launch()  # on a current directory with a module that is named like one of Python's own
    assert again.wait().cause is Cause.COMPLETED, again.logs()


def test_arguments_refused_by_argparse_are_a_user_error(home: Home) -> None:
    attempt = home.launch("arguments.py")
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.USER_ERROR, 2), attempt.logs()
    told = "the script does not take its arguments: the following arguments are required: --lr"
    assert told in (result.message or "") and "Traceback" not in attempt.logs() and "usage: " in attempt.logs()


def test_exit_code_2_of_a_script_is_a_retryable_exception(home: Home) -> None:
    attempt = home.launch("its_own.py")
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.EXCEPTION, 2), attempt.logs()


def test_permanent_script_faults_are_user_errors_with_advice(home: Home) -> None:
    missing, before, none, phases, epochs = (
        home.launch(f"{name}.py", hook="powerSGD" if name == "none" else "allreduce")
        for name in ("missing", "before", "none", "phases", "epochs")
    )
    result = missing.wait()
    assert (result.cause, result.exit_code) == (Cause.USER_ERROR, EXIT_USER_ERROR), missing.logs()
    assert "'a_module_that_nobody_has'" in (result.message or "") and "code directory" in (result.message or "")

    result = before.wait()
    assert result.cause is Cause.USER_ERROR and "remove that line" in (result.message or ""), before.logs()

    assert none.wait().cause is Cause.COMPLETED, none.logs()
    assert verdicts(none) == ["unmanaged"] and notes(none) == ["no-session"]

    result = phases.wait()
    assert result.cause is Cause.USER_ERROR and "after step 1" in (result.message or ""), phases.logs()

    result = epochs.wait()
    assert result.cause is Cause.USER_ERROR and "after step 2" in (result.message or ""), epochs.logs()
    assert "or epochs(all of them)" in (result.message or "")


@pytest.mark.parametrize("script", ["stdout_closed", "stderr_closed", "no_streams"])
def test_script_that_closed_its_streams_keeps_cause_message_and_exit_code(home: Home, script: str) -> None:
    attempt = home.launch(f"{script}.py")
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.EXCEPTION, 65), attempt.logs()
    assert result.message == "the script ended with sys.exit(65)"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("waits", "the script does not handle SIGTERM and was ended by it"),
        ("full", "the script received SIGTERM and ended by itself, with ValueError: cannot be saved"),
    ],
)
def test_stop_of_script_that_cannot_print_has_result_and_exit_code(home: Home, script: str, message: str) -> None:
    attempt = home.launch(f"{script}.py")
    wait_for((attempt.job.paths.work_dir / "begun").exists, "the script to begin")
    attempt.control(desired=Desired.SUSPEND)
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.API_SUSPEND, EXIT_PREEMPTED), attempt.logs()
    assert result.message == message


def test_rank_that_refuses_to_begin_leaves_its_result_although_the_log_is_full(tmp_path: Path) -> None:
    launch = tmp_path / "launch.json"
    launch.write_text('{"protocol": 999}')
    env = {**os.environ, names.LAUNCH_FILE: str(launch), names.ATTEMPT_DIR: str(tmp_path), names.RANK: "0"}
    with Path("/dev/full").open("w") as full:
        code = subprocess.run(
            [sys.executable, "-m", "ratchet_worker.rank"], env=env, stderr=full, timeout=60
        ).returncode
    result = RankResult.model_validate_json(AttemptPaths(tmp_path).rank_result(0).read_bytes())
    assert (result.cause, code) == (Cause.UPGRADE, exit_code_of(Cause.UPGRADE))


FORKING = """
import os, signal, sys
from ratchet_worker.coordination.stop_listener import Listener
listener = Listener()
listener.install()
child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM, status
assert listener.wait(0) == (None, 0) and not listener.sigterm_received
os.kill(os.getpid(), signal.SIGTERM)
assert listener.wait(10)[0] == "sigterm"
"""


def test_sigterm_to_a_forked_child_process_does_not_stop_the_job() -> None:
    """As every ``multiprocessing.Pool`` ends its workers."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
