"""Steps that a SIGKILL took are done again, and compared with what the killed ranks left of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from ratchet_contract.checkpoint.step_ring import read_ring
from ratchet_contract.phases import Cause
from ratchet_store.read.checkpoint_reader import CheckpointReader
from tests.support.launch import Attempt, Job

SCRIPT = '''
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ratchet_worker.ipc.progress_counter import CounterReader
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session import Session

FLAG, HIDDEN, TOTAL, EVERY = Path(sys.argv[1]), sys.argv[2], 14, 6


def die_once(session, at):
    """In the middle of a step, when all ranks have finished the one before, and what was due is saved."""
    flag = FLAG / str(at)
    if session.rank != 1 or session.step + 1 != at or flag.exists():
        return
    attempt = max((FLAG / "job/jobs/job-1/attempts").iterdir())
    end = time.monotonic() + 30
    while not all((found := CounterReader(p).read()) and found.finished >= at - 1 for p in (attempt / "counters").iterdir()):
        assert time.monotonic() < end
        time.sleep(0.005)
    saved = f"step-{(at - 1) // EVERY * EVERY:012d}.*/MANIFEST.json"
    while at > EVERY and not list((FLAG / "job/jobs/job-1/checkpoints").glob(saved)):
        assert time.monotonic() < end, saved
        time.sleep(0.005)
    flag.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    session = Session()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    if HIDDEN == "unreadable":
        net.mask = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["mask"])
        attempt = max((FLAG / "job/jobs/job-1/attempts").iterdir())
        (attempt / "fingerprints" / f"rank-{session.rank:05d}.bin").mkdir(parents=True)
    model = session.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TrainLoader(TensorDataset(torch.randn(64, 8)), batch_size=4, seed=3, rank=session.rank, world_size=session.world_size)
    session.register(optimizer=optimizer, data=data)
    hidden, seen = torch.Generator().manual_seed(5), []  # local variables: nobody else sees them
    batches = session.batches()
    for step in session.steps(TOTAL):
        for at in map(int, sys.argv[3:]):
            die_once(session, at)
        (x,) = next(batches)
        if HIDDEN == "generator":
            x = x + torch.randn(x.shape, generator=hidden)
        seen.append(step)
        if HIDDEN in ("draws", f"draws-of-rank-{session.rank}") and len(seen) % 4 == 0:
            random.random()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log({"loss": loss})
    session.finish()


main()
'''


class Make(Protocol):
    def __call__(self, hidden: str, *kills: int, **spec: Any) -> Job: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Job] = []

    def job(hidden: str, *kills: int, **spec: Any) -> Job:
        code = tmp_path / "code"
        code.mkdir()
        (code / "train.py").write_text(SCRIPT)
        script = ["train.py", str(tmp_path), hidden, *map(str, kills)]
        whole = {
            "script": script,
            "code": {"path": str(code)},
            "checkpoint": {"every_steps": 6, "first": "off"},
            **spec,
        }
        made.append(Job(tmp_path / "job", whole, code))
        return made[-1]

    yield job
    for one in made:
        one.close()


def redone(attempt: Attempt, rank: int = 0) -> dict[str, Any]:
    """The last word of a rank."""
    found: dict[str, Any] = attempt.messages(rank, "redone")[-1].model_dump(
        exclude={"kind", "rank", "at", "world_size"}
    )
    return found


def killed_and_resumed(job: Job, cause: Cause = Cause.COMPLETED) -> Attempt:
    first = job.launch()
    assert first.wait().cause is Cause.RANK_KILLED, first.logs()
    assert not first.messages(kind="redone")
    second = job.launch()
    assert second.wait().cause is cause, second.logs()
    return second


def test_redone_steps_are_proved_equal(make: Make) -> None:
    """The second kill comes behind a checkpoint of the second attempt; one before the first checkpoint takes everything."""
    job = make("nothing", 5, 11, 13)
    whole = {"first_difference": None, "reason": None}
    assert job.launch().wait().cause is Cause.RANK_KILLED
    for steps in (4, 4):
        attempt = job.launch()
        assert attempt.wait().cause is Cause.RANK_KILLED, attempt.logs()
        assert [redone(attempt, rank) for rank in (0, 1)] == [
            {"steps": steps, "compared": steps, "equal": steps, **whole}
        ] * 2
    # from step 12: nothing is lost
    last = job.launch()
    assert last.wait().cause is Cause.COMPLETED and last.report().base.step == 12, last.logs()
    assert not last.messages(kind="redone")
    assert [*read_ring(last.paths.ring(1))] == [13, 14]


@pytest.mark.parametrize(("hidden", "step", "part"), [("generator", 7, "parameters"), ("draws", 8, "generators")])
def test_hidden_state_is_detected_at_the_first_different_redone_step(
    make: Make, hidden: str, step: int, part: str
) -> None:
    """The resume report says exact: the hidden state is a local variable. ``draws``: each fourth step of an attempt does."""
    job = make(hidden, 11)
    attempt = killed_and_resumed(job)
    assert attempt.report().verdict == "exact"
    for rank in (0, 1):
        found = redone(attempt, rank)
        assert (found["steps"], found["compared"], found["equal"]) == (4, 4, step - 7)
        assert found["first_difference"] == {"step": step, "rank": rank, "part": part}
        told = [m.first_difference is None for m in attempt.messages(rank, "redone")]
        assert told.index(False) < len(told) - 1  # at once, and not with the last word
    newest = CheckpointReader(job.newest()).manifest
    assert newest.environment["provenance:not_exact_since"] == "step 6, attempt 1"


def test_redone_step_that_differs_on_another_rank_than_0_alone_marks_later_checkpoints(make: Make) -> None:
    job = make("draws-of-rank-1", 11, 13)
    attempt = killed_and_resumed(job, Cause.RANK_KILLED)
    assert redone(attempt, 0)["first_difference"] is None
    assert redone(attempt, 1)["first_difference"] == {"step": 8, "rank": 1, "part": "generators"}
    last = job.launch()
    assert last.wait().cause is Cause.COMPLETED and last.report().base.step == 12, last.logs()
    assert last.report().not_exact_since == "not exact since the resume from step 6, attempt 1"


def test_different_redone_step_ends_the_job_under_strict(make: Make) -> None:
    job = make("generator", 11, determinism="strict")
    attempt = killed_and_resumed(job, Cause.USER_ERROR)
    result = attempt.wait()
    assert "step 7, done again, differs from its first execution (parameters of rank" in str(result.message)
    assert "`ratchet fork job-1 --set determinism=warn`" in str(result.message)
    assert result.last_step < 8 and job.checkpoints()[-1].startswith("step-000000000006")


def test_redone_steps_under_another_hook_are_not_compared(make: Make) -> None:
    """From the beginning: no checkpoint says what was before."""
    job = make("nothing", 4)
    assert job.launch().wait().cause is Cause.RANK_KILLED
    attempt = job.launch(spec={"hook": {"name": "fp16_compress"}})
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    told = redone(attempt)
    assert (told["steps"], told["compared"]) == (3, 0)
    assert "attempt 1 ran under other facts: hook (allreduce" in told["reason"] and "-> fp16_compress" in told["reason"]


def test_redone_steps_on_another_number_of_ranks_are_not_compared(make: Make) -> None:
    job = make("nothing", 11)
    assert job.launch().wait().cause is Cause.RANK_KILLED
    attempt = job.launch(spec={"world": {"ranks_per_node": 1, "device": "cpu"}})
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert attempt.report().verdict == "not-exact"
    told = redone(attempt)
    assert (told["steps"], told["compared"], told["equal"]) == (4, 0, 0)
    assert told["reason"] == "the resume is not exact: ranks_per_node (2 -> 1), world_size (2 -> 1)"


def test_lost_fingerprints_are_counted_and_not_taken_as_proof(make: Make) -> None:
    job = make("nothing", 11)
    first = job.launch()
    assert first.wait().cause is Cause.RANK_KILLED
    ring = first.paths.ring(1)
    data = bytearray(ring.read_bytes())
    data[16 * 1024 + 9 * 40 + 8] ^= 1  # torn: in the record of step 9
    ring.write_bytes(data)
    second = job.launch()
    assert second.wait().cause is Cause.COMPLETED, second.logs()
    told = redone(second)
    assert (told["steps"], told["compared"], told["equal"]) == (4, 3, 3)
    assert "fingerprints of 1 step no longer exist" in told["reason"]


def test_fingerprints_that_are_missing_or_leave_out_parameters_are_noted(make: Make) -> None:
    attempt = make("unreadable", 4).launch()
    assert attempt.wait().cause is Cause.RANK_KILLED, attempt.logs()
    for rank in (0, 1):
        told = {note.type: note.message for note in attempt.notes(rank)}
        assert "Is a directory" in told["fingerprints-unavailable"], told
        assert "leave out 1 parameter without own memory: mask" in told["fingerprints-partial"], told


def test_fingerprints_of_another_version_of_ratchet_are_not_compared(make: Make) -> None:
    job = make("nothing", 11)
    first = job.launch()
    assert first.wait().cause is Cause.RANK_KILLED
    for rank in (0, 1):
        data = bytearray(first.paths.ring(rank).read_bytes())
        data[8] -= 1  # its format's version
        first.paths.ring(rank).write_bytes(data)
    second = job.launch()
    assert second.wait().cause is Cause.COMPLETED, second.logs()
    told = redone(second)
    assert (told["steps"], told["compared"], told["equal"]) == (4, 0, 0) and told["first_difference"] is None
    assert told["reason"] == "attempt 1 left no fingerprints that this version of Ratchet reads"
