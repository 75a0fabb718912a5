"""A Session without a service: under python, torchrun, pdb and pytest, killed and started again, it ends in the same bits."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.exit_codes import EXIT_PREEMPTED
from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import Cause
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare, render
from tests.support.agent_host import APART
from tests.support.fork_server import RANKS
from tests.support.full_matrix import full
from tests.support.launch import Job
from tests.support.server import wait_for

STEPS = 24
SCRIPT = '''
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn

from ratchet import Session, TrainLoader

HOOK = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 4}


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, (x.sum() > 0).long()


def act(step, rank):
    """By start and rank: the step in whose body a signal comes, or that is held there."""
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for when, who, at, what in json.loads(os.environ.get("PLAN", "[]")):
        if (when, who, at) != (start, rank, step):
            continue
        if what == "fill":
            while not [*Path("ratchet-checkpoints/checkpoints").glob("step-*05.*/MANIFEST.json")]:
                time.sleep(0.01)
            ballast = os.open("ratchet-checkpoints/ballast", os.O_CREAT | os.O_WRONLY)
            try:
                while True:
                    os.write(ballast, bytes(4096))
            except OSError:
                return
        if what != "hold":
            os.kill(os.getpid(), getattr(signal, what))
            continue
        Path("held").touch()
        while True:
            time.sleep(0.01)


def train(directory="ratchet-checkpoints", steps=24, fail_at=None):
    with Session(directory, hook=HOOK, checkpoint={"every_steps": 5}, determinism="strict") as session:
        data = TrainLoader(Points(), batch_size=4, seed=session.seed, rank=session.rank, world_size=session.world_size)
        net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 2))
        model = session.wrap(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        session.register(optimizer=optimizer, data=data)
        batches = session.batches()
        for step in session.steps(steps):
            x, y = next(batches)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            act(step, session.rank)
            if step == fail_at:
                raise ArithmeticError("wrong in the loop")
        return session.step, session.resumed


if __name__ == "__main__":
    train()
'''
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    yield project


def _environ(plan: str = "[]") -> dict[str, str]:
    return {**os.environ, "PLAN": plan, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def _run(place: Path, *command: str, plan: str = "[]", **more: str) -> subprocess.CompletedProcess[str]:
    """``more``: variables."""
    return RANKS.run([sys.executable, *command], cwd=place, env=_environ(plan) | more)


def _final(root: Path, step: int = STEPS) -> Path:
    (found,) = (root / "checkpoints").glob(f"step-{step:012d}.*")
    assert read_manifest(found).finished
    return found


def _assert_proved(told: str, done: int) -> None:
    """The last resume that ``told`` speaks of was exact, and each step up to ``done`` that it did again was compared."""
    base = int(re.findall(r"^ratchet: resumed exactly from step (\d+) of \./ratchet-checkpoints$", told, re.M)[-1])
    redone = done - base
    proved = re.findall(r"^ratchet: proved: (\d+) of (\d+) redone steps?$", told, re.M)
    assert (redone == 0) or (int(proved[-1][0]), int(proved[-1][1])) == (redone, redone), told


def test_ranks_killed_under_torchrun_resume_exactly(place: Path, tmp_path: Path) -> None:
    # The first kill may come before there is a checkpoint. At the second the save of step 5 is done: that of 10 waits for it.
    first, second = random.randrange(3, 12), random.randrange(14, STEPS - 1)
    rank = random.randrange(2)
    plan = f'[["0", {rank}, {first}, "SIGKILL"], ["1", {1 - rank}, {second}, "SIGKILL"]]'

    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "train.py").write_text(SCRIPT)
    undisturbed = _run(whole, *TORCHRUN, "train.py")
    killed = _run(place, *TORCHRUN, "--max-restarts", "2", "train.py", plan=plan)

    assert (undisturbed.returncode, killed.returncode) == (0, 0), f"{plan}\n{undisturbed.stderr}\n{killed.stderr}"
    starts = re.findall(r"^ratchet: (begins at step 0|resumed exactly from step)", killed.stderr, re.M)
    assert len(starts) == 3 and starts[-1].startswith("resumed"), f"{plan}\n{killed.stderr}"
    _assert_proved(killed.stderr, second)
    same = compare(_final(whole / "ratchet-checkpoints"), _final(place / "ratchet-checkpoints"))
    assert same.identical, f"{plan}\n{render(same)}"

    job = Job(
        tmp_path,
        {
            "script": ["train.py"],
            "code": {"path": str(place)},
            "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 4},
            "checkpoint": {"every_steps": 10},
            "determinism": "strict",
        },
        place,
    )
    try:
        attempt = job.launch()
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        (note,) = [m.message for m in attempt.messages(kind="note") if m.type == "session-arguments"]
        assert note.endswith("checkpoint.every_steps (5 in the script, 10 in the job's spec)")
        served = compare(job.newest(), _final(place / "ratchet-checkpoints"))
        assert not served.different and served.tensors, render(served)
    finally:
        job.close()


@pytest.mark.parametrize("threads", ["0", "²"])  # the superscript is a digit, but no number
def test_script_trains_with_a_number_of_threads_that_openmp_ignores(place: Path, threads: str) -> None:
    ended = _run(place, "train.py", OMP_NUM_THREADS=threads)
    assert ended.returncode == 0, ended.stderr


def test_script_interrupted_stopped_and_debugged_resumes_exactly(place: Path, tmp_path: Path) -> None:
    whole = _run(tmp_path, str(place / "train.py"))  # another current directory
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr.startswith("ratchet: begins at step 0: there is no checkpoint in ./ratchet-checkpoints\n")

    said = tmp_path / "said"
    with said.open("wb") as log:
        held = RANKS.start(
            [sys.executable, "train.py"], log.fileno(), env=_environ('[["0", 0, 13, "hold"]]'), cwd=place
        )
    try:
        wait_for(lambda: (place / "held").exists() or held.poll() is not None, "the script to be held")
        other = _run(place, "train.py")
        assert other.returncode == 1 and "another process trains with the checkpoints in" in other.stderr
        held.send_signal(signal.SIGINT)
        wait_for(lambda: "interrupt again to end at once" in said.read_text(), "the answer to the first interrupt")
        held.send_signal(signal.SIGINT)  # the end of the step never comes
        code = held.wait(60)
        assert (code, "interrupted twice" in said.read_text()) == (128 + signal.SIGINT, True), said.read_text()
    finally:
        held.kill()

    stopped = _run(place, "train.py", plan='[["0", 0, 17, "SIGTERM"]]')
    assert stopped.returncode == EXIT_PREEMPTED, stopped.stderr
    _assert_proved(stopped.stderr, 13)
    (at,) = re.findall(
        r"stopped after step (\d+): the next start continues from step \1 of \./ratchet-checkpoints", stopped.stderr
    )
    assert 18 <= int(at) < STEPS

    debugged = _run(place, "-m", "pdb", "-c", "continue", "train.py")
    assert f"ratchet: resumed exactly from step {at} of" in debugged.stderr, debugged.stderr
    final = _final(place / "ratchet-checkpoints")
    assert len([*(place / "ratchet-checkpoints" / "checkpoints").glob("step-*")]) == 3  # keep_last, over all starts
    same = compare(_final(tmp_path / "ratchet-checkpoints"), final)
    assert same.identical, render(same)

    again = _run(place, "train.py")
    assert again.returncode == 0, again.stderr
    assert "has ended with step 24, so that nothing is left to do" in again.stderr
    assert _final(place / "ratchet-checkpoints") == final


RETRAINING = """
from pathlib import Path

from train import train

try:
    train(fail_at=12)
except ArithmeticError:
    pass
for checkpoint in Path("ratchet-checkpoints/checkpoints").iterdir():
    (checkpoint / "left.tmp").mkdir()  # the system refuses to remove it as a file
print(train(), train("other"), train(), flush=True)
"""


def test_surplus_that_cannot_be_deleted_is_reported_and_the_directory_is_released(place: Path) -> None:
    (place / "retrain.py").write_text(RETRAINING)
    done = _run(place, "retrain.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(24, True) (24, False) (24, True)\n"
    assert "ratchet: surplus checkpoints are not deleted: " in done.stderr and "left.tmp" in done.stderr


ORDINARY_LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ratchet import Session

session = Session()
torch.manual_seed(1)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(2):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if session.rank == 0:
    print([value.item() for value in model.module.weight[0]])
"""


def test_ended_run_is_loaded_by_another_number_of_ranks(place: Path) -> None:
    (place / "train.py").write_text(ORDINARY_LOOP)
    first = _run(place, *TORCHRUN, "train.py")
    again = _run(place, "train.py")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert again.stdout == first.stdout != ""
    assert "has ended with step 6, so that nothing is left to do" in again.stderr


def test_ended_run_trains_on_when_more_epochs_are_requested(place: Path) -> None:
    text = ORDINARY_LOOP.replace("session.epochs(2)", "session.epochs(int(sys.argv[1]))").replace(
        "import torch", "import sys\nimport torch", 1
    )
    (place / "train.py").write_text(text)
    whole = _run(place, "train.py", "4")
    (place / "ratchet-checkpoints").rename(place / "whole")
    first = _run(place, "train.py", "2")
    again = _run(place, "train.py", "4")
    assert whole.returncode == first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert again.stdout == whole.stdout != first.stdout
    assert "has ended with step 12, so" not in again.stderr and "resumed from step 12" in again.stderr
    assert "total_steps (12 -> 24)" in again.stderr and "replace those from the script" in again.stderr
    assert "step 24 is saved" in again.stderr
    text = (
        "has ended with step 24, so that nothing is left to do. It continues if the script requests more than 24 steps"
    )
    assert text in _run(place, "train.py", "4").stderr


ITERABLE = """
from torch.utils.data import IterableDataset

class Numbers(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(torch.ones(24, 4), torch.ones(24, 1)))

data = Numbers()
"""
STEPS_LOOP = """
import os
import sys

import torch
from torch import nn

from ratchet import Session

session = Session()
torch.manual_seed(1)
model, optimizer = session.prepare(net := nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1))
if "restore" in sys.argv:
    session.restore()
for total in map(int, os.environ["TOTALS"].split()):
    for step in session.steps(total):
        print("step", step, flush=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
session.finish()
"""


def test_changed_total_steps_make_resume_not_exact(place: Path) -> None:
    (place / "train.py").write_text(STEPS_LOOP)
    first = _run(place, "train.py", "restore", TOTALS="4")
    assert first.returncode == 0 and first.stdout == "step 0\nstep 1\nstep 2\nstep 3\n", first.stderr
    again = _run(place, "train.py", "restore", TOTALS="6")
    assert again.returncode == 0 and again.stdout == "step 4\nstep 5\n", again.stderr
    assert "not exact: total_steps (4 -> 6)" in again.stderr and "nothing is left" not in again.stderr
    assert '"type":"other-total"' in JobPaths(place / "ratchet-checkpoints").attempt(2).spool(0).read_text()
    further = _run(place, "train.py", "restore", TOTALS="7")
    assert "step 6 of ./ratchet-checkpoints as it was saved, which is not exact since" in further.stderr
    (place / "ratchet-checkpoints").rename(place / "first")
    assert _run(place, "train.py", TOTALS="4").returncode == 0
    other = _run(place, "train.py", TOTALS="6")
    assert "and not exactly: total_steps (4 -> 6)" in other.stderr and other.stdout == again.stdout, other.stderr


def test_resume_names_changed_thread_counts_and_that_the_hash_seed_is_random(place: Path) -> None:
    threads = 'torch.set_num_interop_threads(int(os.environ["INTEROP"]))  # torch changes this number only once\n'
    (place / "train.py").write_text(STEPS_LOOP.replace("session = Session()", f"{threads}session = Session()"))
    environ = {name: v for name, v in _environ().items() if name not in ("OMP_NUM_THREADS", "PYTHONHASHSEED")}
    cores = len(os.sched_getaffinity(0))
    for variables in (
        {"TOTALS": "2", "INTEROP": "3"},
        {"TOTALS": "3", "INTEROP": "2", "OMP_NUM_THREADS": str(cores + 1)},
    ):
        done = RANKS.run([sys.executable, "train.py"], cwd=place, env=environ | variables)
        assert done.returncode == 0, done.stderr
    assert "interop_threads (3 -> 2)" in done.stderr and f"threads ({cores} -> {cores + 1})" in done.stderr, done.stderr
    assert "not compared: " in done.stderr and "since PYTHONHASHSEED is not set" in done.stderr, done.stderr


def test_buffer_of_a_dtype_that_cannot_be_stored_is_refused_before_the_first_step(place: Path) -> None:
    buffer = 'net.register_buffer("table", torch.zeros(3, dtype=torch.complex128))\n'
    (place / "train.py").write_text(STEPS_LOOP.replace('if "restore"', f'{buffer}if "restore"'))
    refused = _run(place, "train.py", TOTALS="4")
    assert refused.returncode != 0 and refused.stdout == "", refused.stdout + refused.stderr
    assert "buffers/table: torch.complex128 cannot be stored" in refused.stderr, refused.stderr


FOLDS = """
import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ratchet import Session

averages = []
for fold in range(2):
    with Session(f"fold-{fold}", determinism="strict") as session:
        net = nn.Linear(4, 1)
        average = AveragedModel(net)
        given = [net, torch.optim.SGD(net.parameters(), lr=0.1), average]
        model, optimizer, *_ = session.prepare(*(given if fold == 0 or len(sys.argv) == 1 else given[:2]))
        averages.append(average)
        for step in session.steps(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(net)
"""


def test_model_average_of_earlier_run_is_not_reported_missing_in_later_run(place: Path) -> None:
    (place / "train.py").write_text(FOLDS)
    done = _run(place, "train.py")
    assert done.returncode == 0, done.stderr
    for fold in place.glob("fold-*"):
        shutil.rmtree(fold)
    refused = _run(place, "train.py", "without")
    assert refused.returncode != 0 and "AveragedModel: created by the script" in refused.stderr, refused.stderr


def test_more_steps_per_epoch_leave_an_ended_run_ended(place: Path) -> None:
    (place / "train.py").write_text(ORDINARY_LOOP)
    assert _run(place, "train.py").returncode == 0
    (place / "train.py").write_text(ORDINARY_LOOP.replace("batch_size=4", "batch_size=2"))
    again = _run(place, "train.py")
    assert again.returncode == 0 and "total_steps (12 -> 24)" in again.stderr, again.stderr
    assert "has ended with step 12, so that nothing is left to do. For a new run" in again.stderr, again.stderr


def test_second_training_loop_is_refused_at_every_start(place: Path) -> None:
    (place / "train.py").write_text(STEPS_LOOP)
    for printed in ("step 0\nstep 1\n", ""):
        start = _run(place, "train.py", TOTALS="2 4")
        assert start.returncode != 0 and "another step was requested after step 2, which was the last" in start.stderr
        assert start.stdout == printed


@pytest.mark.parametrize("data", ["map-style", "iterable"])
def test_changed_rank_count_within_an_epoch_restarts_the_epoch(place: Path, data: str) -> None:
    text = (
        ORDINARY_LOOP
        if data == "map-style"
        else ORDINARY_LOOP.replace("data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))\n", ITERABLE).replace(
            "sampler=DistributedSampler(data)", "num_workers=0"
        )
    )
    text = text.replace("Session()", 'Session(on_hook_mismatch="redistribute")')
    (place / "train.py").write_text(
        text.replace(
            "        optimizer.step()\n",
            "        optimizer.step()\n"
            "        if session.step == 1:\n            session.checkpoint()\n            raise SystemExit(9)\n",
        )
    )
    assert _run(place, *TORCHRUN, "train.py").returncode != 0
    (place / "train.py").write_text(text)
    again = _run(place, "train.py")
    assert again.returncode == 0, again.stderr
    assert "epoch 0 begins again, so that its batches up to there are trained on twice" in again.stderr, again.stderr
    (resumed,) = [line for line in again.stderr.splitlines() if "resumed from step" in line]
    assert len(max(resumed.split(), key=len)) < 60, "digests are shortened"


IN_PYTEST = """
import signal
import threading
import pytest
import torch.distributed as dist
from ratchet import Session, UserError
from train import train


def test_one_after_the_other(tmp_path, monkeypatch):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert train(tmp_path / "a", steps=8) == (8, False)
    with pytest.raises(ArithmeticError):
        train(tmp_path / "b", steps=8, fail_at=6)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert train(tmp_path / "b", steps=8) == (8, True)

    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    for arguments, said in (
        ({"directory": tmp_path / "c"}, "is no directory of a run"),
        ({"directory": "/proc/run"}, "/proc/run cannot be used for checkpoints .No such file"),
        ({"hook": "powersgdd"}, "/hook"),
        ({"checkpoint": {"uri": "s3://bucket/prefix"}}, "checkpoint.uri"),
    ):
        with pytest.raises(UserError, match=said):
            Session(**{"directory": tmp_path / "d", **arguments})
    with Session(tmp_path / "d"), pytest.raises(UserError, match="another Session with other arguments") as refused:
        Session(tmp_path / "e")
    assert refused.value.code == "session-open" and not (tmp_path / "e").exists()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(UserError, match="remove that line"):
        Session(tmp_path / "d")
    assert dist.is_initialized()
    dist.destroy_process_group()
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
        Session(tmp_path / "d", determinism="strict")

    caught = []

    def elsewhere():
        try:
            Session(tmp_path / "d")
        except UserError as error:
            caught.append(error.code)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert caught == ["not-the-main-thread"]
    monkeypatch.setenv("RATCHET_JOB_ID", "job-1")
    with pytest.raises(UserError, match="by a rank of job job-1"):
        Session(tmp_path / "d")
"""


def test_two_consecutive_sessions_in_a_pytest_function_work(place: Path) -> None:
    (place / "test_train.py").write_text(IN_PYTEST)
    found = _run(place, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_train.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "not compared" in found.stderr and "and the main file" in found.stderr


ALERTING = """
from torch import nn
from ratchet import Session, UserError

with Session() as session:
    model = session.wrap(nn.Linear(4, 2))
    for step in session.steps(3):
        model.module.weight.grad = None
        if step == 1:
            session.alert("loss is high", "it is\\n9.5", level="warning")
            try:
                session.alert("loss is high", level="fatal")
            except UserError as error:
                print(error)
"""


def test_alert_without_a_service_is_one_line_on_stderr(place: Path) -> None:
    (place / "alerting.py").write_text(ALERTING)
    found = _run(place, "alerting.py")
    assert found.returncode == 0, found.stderr
    assert [line for line in found.stderr.splitlines() if "loss is high" in line] == [
        "ratchet: warning: loss is high: it is 9.5"
    ]
    assert "an alert's level is info, warning, error, not 'fatal'" in found.stdout


IN_A_THREAD = """
import threading
from ratchet import Session
from train import HOOK, train

session = Session(hook=HOOK, checkpoint={"every_steps": 5}, determinism="strict")
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def test_stop_ends_a_process_that_trains_in_another_thread(place: Path) -> None:
    (place / "threaded.py").write_text(IN_A_THREAD)
    stopped = _run(place, "threaded.py", plan='[["0", 0, 7, "SIGTERM"]]')
    assert stopped.returncode == EXIT_PREEMPTED, stopped.stderr
    assert "the next start continues from step" in stopped.stderr


ON_A_SMALL_DISK = """
mkdir ratchet-checkpoints
mount -t tmpfs -o size=4m none ratchet-checkpoints
"$1" train.py
test $? = 1 || exit 9
rm ratchet-checkpoints/ballast
PLAN=[] "$1" train.py
"""


@full
@pytest.mark.skipif(not APART, reason="needs root and mount namespaces")
def test_full_disk_is_reported_and_next_start_with_space_resumes(place: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", ON_A_SMALL_DISK, "sh", sys.executable],
        cwd=place,
        env=_environ('[["0", 0, 7, "fill"]]'),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    failed = re.findall(r"^ratchet: step (\d+) was not saved: .* the disk is full: free space, ", done.stderr, re.M)
    assert failed == ["10", "15", "20"] and "3 saves in a row failed, the last at step 20" in done.stderr, done.stderr
    assert "resumed exactly from step 5" in done.stderr and "the run has ended" in done.stderr, done.stderr


AT_A_PROMPT = """
import code, os, signal, time, torch
from ratchet import Session

def cell(interrupt=None, error=None):
    session = Session(checkpoint={"every_steps": 2})
    net = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in session.steps(6):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            while not session.should_stop:
                time.sleep(0.01)
        if step == error:
            net.a_word_that_is_not_there
    session.finish()
    return session.step, session.resumed
"""
INTERRUPTED = """
try:
    cell(interrupt=3)
except SystemExit as stop:
    print("stopped", stop.code)
print(cell())
"""
FAILED = """
prompt = code.InteractiveInterpreter(globals())
prompt.runcode("cell(error=3)")
prompt.runcode("print(cell())")
"""
CELLS = """
session = Session()
net = torch.nn.Linear(4, 1)
model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
def train():
    for step in session.steps(2):
        print(Session().step, Session().resumed)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
prompt = code.InteractiveInterpreter(globals())
prompt.runcode("missing_before")
prompt.runcode("train()")
prompt.runcode("missing_after")
prompt.runcode("print(Session().step, Session().resumed)")
prompt.runcode("session.finish()")
"""


def typed_at_a_prompt(place: Path, cells: str) -> subprocess.CompletedProcess[str]:
    """A Python prompt that reads ``AT_A_PROMPT`` and then ``cells``, to its end."""
    return subprocess.run(
        [sys.executable],
        input=AT_A_PROMPT + cells,
        cwd=place,
        env=_environ(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@full
def test_interrupted_training_at_a_python_prompt_resumes(place: Path) -> None:
    done = typed_at_a_prompt(place, INTERRUPTED)
    assert (done.returncode, done.stdout) == (0, "stopped 143\n(6, True)\n"), done.stderr
    assert "stopped after step 4: the next start continues from step 4" in done.stderr, done.stderr
    assert "and the main file" in done.stderr or "the code, which has no file" in done.stderr


@full
def test_failed_training_at_a_python_prompt_resumes(place: Path) -> None:
    done = typed_at_a_prompt(place, FAILED)
    assert (done.returncode, done.stdout) == (0, "(6, True)\n"), done.stderr
    assert "a_word_that_is_not_there" in done.stderr and "the next start continues from" in done.stderr, done.stderr


def test_error_outside_of_the_training_at_a_python_prompt_leaves_the_run_open(place: Path) -> None:
    done = typed_at_a_prompt(place, CELLS)
    assert (done.returncode, done.stdout) == (0, "0 False\n1 False\n2 False\n"), done.stderr
    assert "missing_before" in done.stderr and "missing_after" in done.stderr, done.stderr
    assert "not ended" not in done.stderr and "nothing is left to do" not in done.stderr, done.stderr


def test_start_without_training_deletes_no_checkpoint(place: Path) -> None:
    """Its own retention may be another: that of a script that evaluates, or the default."""
    keeping = "Session(directory, hook=HOOK, checkpoint={'every_steps': 5, 'keep_last': 50}"
    (place / "train.py").write_text(
        SCRIPT.replace('Session(directory, hook=HOOK, checkpoint={"every_steps": 5}', keeping)
    )
    assert _run(place, "train.py").returncode == 0
    root = place / "ratchet-checkpoints" / "checkpoints"
    kept = sorted(path.name for path in root.iterdir())
    assert len(kept) >= 5
    (place / "train.py").write_text(SCRIPT)  # keep_last is 3
    assert "determinism is strict and this is not what was recorded: code_digest" in _run(place, "train.py").stderr
    (place / "train.py").write_text(SCRIPT.replace('"strict"', '"warn"'))
    assert "has ended" in _run(place, "train.py").stderr
    (place / "train.py").write_text(SCRIPT.replace('"powerSGD"', '"powerSGDD"'))
    assert _run(place, "train.py").returncode != 0
    (place / "train.py").write_text(SCRIPT.replace("hook=HOOK", 'hook="allreduce"'))
    other = _run(place, "train.py")
    assert other.returncode != 0 and "set Session(on_hook_mismatch=...) to reset" in other.stderr, other.stderr
    for layers, odd in (
        ("nn.Linear(32, 2), nn.Linear(2, 2)", "the model has 5.bias, and it does not"),
        ("nn.Identity()", "it has 4.bias, and the model does not"),
    ):
        (place / "train.py").write_text(SCRIPT.replace("nn.Linear(32, 2)", layers))
        other = _run(place, "train.py")
        assert other.returncode != 0 and f"the checkpoint is of another model: {odd}" in other.stderr, other.stderr
    assert 'start a new run: Session("another-directory")' in other.stderr
    assert sorted(path.name for path in root.iterdir()) == kept
    (place / "train.py").write_text(
        SCRIPT.replace("hook=HOOK", 'hook="allreduce", on_hook_mismatch="reset"').replace('"strict"', '"warn"')
    )
    followed = _run(place, "train.py")
    assert followed.returncode == 0 and "has ended with step 24" in followed.stderr, followed.stderr


def test_unregistered_scheduler_is_named_and_makes_resume_not_exact(
    place: Path,
) -> None:
    begins = "        batches = session.batches()\n"
    made = "        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 40)\n"
    stepped = SCRIPT.replace(begins, begins + made).replace(
        "optimizer.zero_grad()", "optimizer.zero_grad(); scheduler.step()"
    )
    (place / "train.py").write_text(stepped)
    refused = _run(place, "train.py")
    assert refused.returncode != 0 and "OneCycleLR: created by the script" in refused.stderr, refused.stderr
    (place / "train.py").write_text(stepped.replace('"strict"', '"warn"').replace("train()\n", "train(fail_at=12)\n"))
    first = _run(place, "train.py").stderr
    assert "ratchet: OneCycleLR: created by the script and not registered" in first, first
    (place / "train.py").write_text(stepped.replace('"strict"', '"warn"'))
    second = _run(place, "train.py").stderr
    assert "exactly from" not in second and "not exactly: " in second and "unregistered" in second, second
    given = (
        stepped.replace("optimizer=optimizer,", "optimizer=optimizer, scheduler=scheduler,")
        .replace(made, "")
        .replace("        session.register(", made + "        session.register(")
    )
    (place / "train.py").write_text(given.replace('"ratchet-checkpoints"', '"another"'))
    assert _run(place, "train.py").returncode == 0


def test_unregistered_optimizer_is_named_after_explicit_restore(place: Path) -> None:
    forgotten = "        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 40)\n"
    script = SCRIPT.replace(
        "        session.register(optimizer=optimizer, data=data)\n",
        f"{forgotten}        session.register(scheduler=scheduler, data=data)\n        session.restore(steps)\n",
    )
    (place / "train.py").write_text(script)
    refused = _run(place, "train.py")
    assert refused.returncode != 0 and "AdamW: created by the script" in refused.stderr, refused.stderr


def test_error_after_the_training_ends_all_ranks(place: Path) -> None:
    """As of any script under torchrun, which ends the others: this rank does not wait for them."""
    report = "if os.environ['RANK'] == '0':\n        raise ArithmeticError('in the report')\n    time.sleep(300)\n"
    behind = f"    train()\n    {report}"
    (place / "train.py").write_text(SCRIPT.replace("    train()\n", behind))
    done = _run(place, *TORCHRUN, "train.py")  # waits less long than rank 1
    assert done.returncode == 1 and "in the report" in done.stderr
    _final(place / "ratchet-checkpoints")


WORKERS = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from ratchet import Session

def main():
    session = Session()
    net = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=2, num_workers=2)
    model, optimizer, loader = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    for epoch in session.epochs(2):
        for number, (x,) in enumerate(loader):
            model(x).sum().backward()
            optimizer.step()
            if number == 3:
                exec(sys.argv[1])

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("raise ValueError('wrong')", 1),
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", EXIT_PREEMPTED, marks=full),
    ],
)
def test_script_with_data_loader_workers_ends_on_error_and_on_stop(place: Path, act: str, code: int) -> None:
    (place / "workers.py").write_text(WORKERS)
    done = _run(place, "workers.py", act)
    assert done.returncode == code, done.stderr
