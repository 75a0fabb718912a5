"""Copies of the state in memory: what a killed rank, a damaged copy and a killed agent leave for the next attempt."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AgentFile, node_rank
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare
from ratchet_worker.ipc import memory_copies
from tests.support.launch import Attempt, Job
from tests.support.server import wait_for

TOTAL = 12
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session import Session

FOLDER, TOTAL = Path(sys.argv[1]), int(sys.argv[2])
KILLS = [argument.split(":") for argument in sys.argv[3:]]  # step:rank:place, each once


def at(session, place):
    step = session.step + 1
    (FOLDER / f"rank-{session.rank}").write_text(str(step))
    for number, (wanted, rank, where) in enumerate(KILLS):
        flag = FOLDER / f"kill-{number}"
        if (int(wanted), int(rank), where) == (step, session.rank, place) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


session = Session()
torch.manual_seed(1)
model = session.wrap(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
data = TrainLoader(TensorDataset(torch.randn(64, 64)), batch_size=4, seed=3, rank=session.rank, world_size=session.world_size)
session.register(optimizer=optimizer, scheduler=scheduler, data=data)
batches = session.batches()
for _ in session.steps(TOTAL):
    at(session, "begin")
    (x,) = next(batches)
    loss = model(x + torch.randn(x.shape)).square().mean()
    loss.backward()
    at(session, "backward")
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    session.log({"loss": loss})
    at(session, "end")
session.finish()
"""
POWER_SGD = {"name": "powerSGD", "matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}

Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Job] = []

    def job(*kills: str, ranks: int = 2, name: str = "job", **spec: Any) -> Job:
        folder = tmp_path / name
        code = folder / "code"
        code.mkdir(parents=True)
        (code / "train.py").write_text(SCRIPT)
        whole = {
            "script": ["train.py", str(folder), str(TOTAL), *kills],
            "code": {"path": str(code)},
            "world": {"ranks_per_node": ranks, "device": "cpu"},
            "hook": POWER_SGD,
            "checkpoint": {"every_steps": 100, "first": "off", "memory_every_steps": 1},
            **spec,
        }
        made.append(Job(folder / "home", whole, code))
        return made[-1]

    yield job
    for one in made:
        one.close()


def notes(attempt: Attempt) -> dict[str, str]:
    """The agent's notes of the job's history, by type."""
    paths = attempt.paths.node_spool(0)
    found = attempt.messages_in(paths) if paths.exists() else []
    return {message.type: message.message for message in found if message.kind == "note"}


def assert_same_end(job: Job, other: Job) -> None:
    found = compare(job.newest(), other.newest())
    assert found.identical, found


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_rank_loses_at_most_one_step(make: Make, ranks: int) -> None:
    """Kills at drawn steps and places; no checkpoint is due before the end."""
    source = random.Random(ranks)
    kills = [
        f"{step}:{source.randrange(ranks)}:{place}"
        for step, place in zip((1, 4, 7, 9), source.sample(["begin", "backward", "end", "begin"], 4), strict=True)
    ]
    job = make(*kills, ranks=ranks)
    for number, kill in enumerate(kills):
        attempt = job.launch()
        result = attempt.wait(180)
        assert result.cause is Cause.RANK_KILLED, attempt.logs()
        step = int(kill.partition(":")[0])
        if step == 1:
            assert job.checkpoints() == []
            continue
        newest = read_manifest(job.newest())
        assert newest.step in (step - 1, step - 2) and newest.attempt == number + 1 and newest.reason == "memory"
        assert (
            result.message is not None and f"step {newest.step} was saved from the copies in memory" in result.message
        )
        assert "continues from it" in notes(attempt)["checkpoint-from-memory"]
    last = job.launch()
    assert last.wait(180).cause is Cause.COMPLETED, last.logs()
    assert last.report().verdict == "exact" and last.report().base.attempt == len(kills)
    assert len(job.checkpoints()) == len(kills)  # three of copies, and the end
    undisturbed = make(name="undisturbed", ranks=ranks, checkpoint={"every_steps": 100, "first": "off"})
    whole = undisturbed.launch()
    assert whole.wait(180).cause is Cause.COMPLETED, whole.logs()
    assert_same_end(job, undisturbed)


FAULTY = Path(__file__).parents[3] / "support" / "fault_job"


class Held:
    """A job of the fault task whose ranks are held before step 8: copies are made during the steps, and a checkpoint at step 5.
    ``folder``: for the ranks' signs; ``inode``: of the file of copies."""

    inode = 0

    def __init__(self, folder: Path, held: list[int], **checkpoint: Any) -> None:
        folder.mkdir()
        self.folder = folder
        spec = {
            "task": {"entrypoint": "fault_task:Faulty", "args": {"steps": TOTAL, "gate": str(folder), "held": held}},
            "code": {"path": str(FAULTY)},
            "hook": POWER_SGD,
            "checkpoint": {"every_steps": 5, "first": "off", "memory_every_steps": 1, **checkpoint},
        }
        self.job = Job(folder / "home", spec, FAULTY)

    def launch(self, step: int, copy: int) -> Attempt:
        """Start an attempt, and wait until its ranks are held before ``step`` and both have their copy with this number."""
        attempt = self.job.launch()
        signs = [self.folder / f"at.{step}.{rank}" for rank in (0, 1)]
        wait_for(lambda: all(sign.exists() for sign in signs), f"the ranks to be held\n{attempt.logs()}", 60)
        with open_copies(attempt) as copies:
            self.inode = os.fstat(copies.fileno()).st_ino
            wait_for(lambda: memory_copies.newest(copies.fileno(), 2) == copy, f"copy {copy}", 60)
        return attempt

    def release(self, step: int) -> None:
        (self.folder / f"go.{step}").touch()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def held(*steps: int, name: str = "held", **checkpoint: Any) -> Held:
        made.append(Held(tmp_path / name, [*steps], **checkpoint))
        return made[-1]

    yield held
    for one in made:
        one.job.close()


def agent_pid(attempt: Attempt) -> int:
    return AgentFile.model_validate_json(attempt.paths.node(0).agent_file.read_bytes()).pid


def open_copies(attempt: Attempt) -> BinaryIO:
    """The file of copies that the agent holds."""
    folder = Path(f"/proc/{agent_pid(attempt)}/fd")
    (found,) = [path for path in folder.iterdir() if "ratchet-copies" in str(path.readlink())]
    assert found.stat().st_mode & 0o777 == 0o600
    return found.open("r+b", buffering=0)


def holders(inode: int) -> list[str]:
    """Processes that hold or map the file of copies with this number."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            files = [
                path.stat().st_ino for path in (process / "fd").iterdir() if "ratchet-copies" in str(path.readlink())
            ]
            lines = (process / "maps").read_text().splitlines()
            files += [int(line.split()[4]) for line in lines if "ratchet-copies" in line]
            found += [process.name] * (inode in files)
    return found


def finished(held: Held, base: int) -> Attempt:
    """The next attempt, which starts from ``base`` and ends as an undisturbed run does."""
    held.release(8)
    last = held.job.launch()
    assert last.wait(180).cause is Cause.COMPLETED, last.logs()
    assert last.report().base.step == base and last.report().verdict == "exact"
    return last


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Held(tmp_path_factory.mktemp("undisturbed") / "job", [], memory_every_steps=None).job
    assert job.launch().wait(180).cause is Cause.COMPLETED
    yield job
    job.close()


def test_copy_is_used_without_a_write_per_step_and_nothing_is_left(hold: Callable[..., Held], undisturbed: Job) -> None:
    held = hold(8)
    first = held.launch(8, 7)
    assert held.job.checkpoints() == ["step-000000000005.a0001"]
    assert [path.name for path in held.job.paths.checkpoints.iterdir()] == ["step-000000000005.a0001"]
    assert len(holders(held.inode)) == 3  # the agent and two ranks
    assert not [path for path in Path("/dev/shm").iterdir() if "ratchet" in path.name]
    first.kill(1)
    result = first.wait(60)
    assert result.message is not None
    assert result.message.endswith(
        "step 7 was saved from the copies in memory: the next attempt continues from it, and does 0 finished steps again"
    )
    assert result.cause is Cause.RANK_KILLED and holders(held.inode) == []
    manifest = read_manifest(held.job.newest())
    assert (manifest.step, manifest.parent.step, manifest.reason) == (7, 5, "memory")
    (committed,) = [m for m in first.messages_in(first.paths.node_spool(0)) if m.kind == "checkpoint"]
    assert (committed.step, committed.digest, committed.rank) == (7, manifest.digest, node_rank(0))
    assert not finished(held, 7).messages(kind="redone")
    assert_same_end(held.job, undisturbed)


@pytest.mark.parametrize("place", ["data", "description"])
def test_damaged_copy_is_named_and_the_checkpoint_on_the_disk_is_used(
    hold: Callable[..., Held], undisturbed: Job, place: str
) -> None:
    held = hold(8)
    first = held.launch(8, 7)
    with open_copies(first) as copies:
        copy = memory_copies.read(copies.fileno(), 1, 7)
        end = len(copy.data) if place == "data" else len(copy.data) + (-len(copy.data) % 4096) + 100
        offset = memory_copies.slot_offset(1, (7 - 1) % 2) + end - 1
        byte = os.pread(copies.fileno(), 1, offset)[0]
        os.pwrite(copies.fileno(), bytes([byte ^ 1]), offset)
    first.kill(0)
    result = first.wait(60)
    assert result.message is not None and "the copies in memory were not used" in result.message
    assert "the newest checkpoint counts" in notes(first)["memory-copies-unused"]
    assert held.job.checkpoints() == ["step-000000000005.a0001"]
    assert finished(held, 5).messages(kind="redone")[-1].equal == 2
    assert_same_end(held.job, undisturbed)


def test_copies_go_with_a_killed_agent(hold: Callable[..., Held], undisturbed: Job) -> None:
    held = hold(8)
    first = held.launch(8, 7)
    os.kill(agent_pid(first), signal.SIGKILL)
    wait_for(lambda: holders(held.inode) == [], "the copies to be freed")
    assert held.job.checkpoints() == ["step-000000000005.a0001"]
    finished(held, 5)
    assert_same_end(held.job, undisturbed)


def test_fenced_attempt_makes_no_checkpoint_of_its_copies(hold: Callable[..., Held]) -> None:
    held = hold(8)
    first = held.launch(8, 7)
    first.paths.fence_file.touch()
    first.kill(0)
    result = first.wait(60)
    if result.cause is not Cause.LEASE_LOST:  # the ranks had ended before the agent read the file
        assert "declared this attempt over" in notes(first)["memory-copies-unused"]
    assert held.job.checkpoints() == ["step-000000000005.a0001"]


STRIKE = """
import os, signal
from ratchet_contract.errors import StateError
from ratchet_worker.checkpoint import memory_copies
from ratchet_worker.state.live_memory import ChangedTooEarly

describe = memory_copies._DescribedPart._write_file


def strike(self, save, *rest):
    if os.environ["RANK"] == "1" and os.environ["RATCHET_ATTEMPT"] == "1" and save.order.step == 6:
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise (ChangedTooEarly if HOW == "change" else StateError)("planned")
    return describe(self, save, *rest)


memory_copies._DescribedPart._write_file = strike
if HOW == "fill":
    memory_copies.available_memory.available = lambda: 3 << 18
"""


@pytest.fixture
def struck(hold: Callable[..., Held], tmp_path: Path) -> Callable[[str], Held]:
    """Rank 1's copy of step 6 of the first attempt is killed half way, or fails."""

    def make(how: str) -> Held:
        held, code = hold(8, **({"every_steps": 100} if how == "kill" else {})), tmp_path / "struck"
        code.mkdir()
        source = (FAULTY / "fault_task.py").read_text()
        begin = source.index("import time")
        (code / "fault_task.py").write_text(source[:begin] + STRIKE.replace("HOW", repr(how)) + source[begin:])
        held.job.code = code
        return held

    return make


def test_kill_in_the_middle_of_a_copy_leaves_the_copy_before(struck: Callable[[str], Held], undisturbed: Job) -> None:
    held = struck("kill")
    first = held.job.launch()
    assert first.wait(60).cause is Cause.RANK_KILLED
    manifest = read_manifest(held.job.newest())
    assert (manifest.step, manifest.reason) == (5, "memory"), first.logs()
    finished(held, 5)
    assert_same_end(held.job, undisturbed)


@pytest.mark.parametrize("how", ["fail", "change"])
def test_failed_copy_is_named_and_later_ones_are_made(struck: Callable[[str], Held], how: str) -> None:
    held = struck(how)
    first = held.launch(8, 7)
    told = {note.type: note.message for rank in (0, 1) for note in first.notes(rank)}
    assert told["memory-copy-failed"] == "step 6 has no copy in memory: rank 1: planned"
    assert ("staging-blocking" in told) == (how == "change")
    first.kill(0)
    first.wait(60)
    assert held.job.checkpoints() == ["step-000000000005.a0001", "step-000000000007.a0001"]


def test_copies_that_do_not_fit_end_the_attempt_before_the_first(struck: Callable[[str], Held]) -> None:
    held = struck("fill")
    result = held.job.launch().wait(60)
    assert result.cause is Cause.USER_ERROR and result.last_step == 1
    assert result.message is not None
    assert "checkpoint.memory_every_steps: two copies of the state of 2 ranks need" in result.message
    assert "1 MiB are available: remove it, or give the job more memory" in result.message
