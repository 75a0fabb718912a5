"""The comparison can fail: a resume from a checkpoint in which one component is another's, or old, ends in other bits.

The hook's own parts (residual, P and Q, generator, bucket layout) and the documented naive recipe have their controls beside the
hooks; here are the components of the whole checkpoint. The untouched copy must end identical, or the others prove nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.paths import checkpoint_dir_name
from ratchet_contract.phases import Cause
from ratchet_store.read.compare import Comparison, compare
from tests.support.launch import Attempt, Job
from tests.support.tamper import Pieces, States, tamper

STEPS, BASE = 36, 24
SPEC: dict[str, Any] = {
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"steps": STEPS, "evaluate": False}},
    "ddp": {"bucket_cap_mb": 0.05},
    "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 10},
    "checkpoint": {"every_steps": BASE, "keep_last": 5},
    "seed": 5,
}


def from_the_other_rank(pieces: Pieces, source: int, target: int, part: str) -> None:
    """Rank ``target`` gets what rank ``source`` has under ``part``."""
    names = [key for key in pieces if key.startswith(f"rank/{target}/{part}")]
    assert names, f"rank {target} stores nothing under {part}"
    for key in names:
        pieces[key][:] = pieces[key.replace(f"rank/{target}/", f"rank/{source}/")]


def nothing(pieces: Pieces, states: States) -> None:
    pass


def rng(pieces: Pieces, states: States) -> None:
    from_the_other_rank(pieces, 0, 1, "rng/torch")


def buffers(pieces: Pieces, states: States) -> None:
    from_the_other_rank(pieces, 1, 0, "buffers/")


def residual(pieces: Pieces, states: States) -> None:
    from_the_other_rank(pieces, 0, 1, "hook/residual/")


def momentum(pieces: Pieces, states: States) -> None:
    names = [key for key in pieces if key.startswith("shared/optimizer/")]
    assert names
    for key in names:
        pieces[key][:] = bytes(len(pieces[key]))


def data_position(pieces: Pieces, states: States) -> None:
    """One batch of every rank is forgotten: it would be given again."""
    for state in states.values():
        entry = next(pair for pair in state["data"]["dict"] if pair[0] == "position")
        assert entry[1] > 0
        entry[1] -= 64


CONTROLS: list[Callable[[Pieces, States], None]] = [nothing, rng, buffers, residual, data_position]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A run that nobody touched, with its checkpoint in the middle kept."""
    job = Job(tmp_path_factory.mktemp("reference"), SPEC)
    try:
        assert job.launch().wait(120).cause is Cause.COMPLETED
        yield job
    finally:
        job.close()


def launch_changed(reference: Job, home: Path, change: Callable[[Pieces, States], None]) -> tuple[Job, Attempt]:
    job = Job(home, SPEC)
    name = checkpoint_dir_name(BASE, 1)
    shutil.copytree(reference.paths.checkpoints / name, job.paths.checkpoints / name)
    tamper(job.paths.checkpoints / name, change)
    return job, job.launch(lineage=[Segment(attempt=1, after_step=0, until_step=BASE)])


def resumed(reference: Job, home: Path, change: Callable[[Pieces, States], None]) -> Comparison:
    """Run the second half in another home, from the reference's middle checkpoint as ``change`` left it."""
    job, attempt = launch_changed(reference, home, change)
    try:
        assert attempt.wait(120).cause is Cause.COMPLETED, attempt.logs()
        base = attempt.base()
        assert base is not None and base.step == BASE
    finally:
        job.close()
    return compare(reference.newest(), job.newest())


@pytest.mark.slow
@pytest.mark.parametrize("change", CONTROLS, ids=lambda c: c.__name__)
def test_only_an_unchanged_checkpoint_resumes_identically(
    reference: Job, tmp_path: Path, change: Callable[[Pieces, States], None]
) -> None:
    comparison = resumed(reference, tmp_path, change)
    assert len(comparison.tensors) > 50
    assert comparison.identical == (change is nothing)
    if change is not nothing:
        weights = [t.name for t in comparison.different if t.name.startswith("shared/model/")]
        assert weights or change is buffers, "the model's weights are expected to differ"


@pytest.mark.slow
def test_changed_replicated_state_with_valid_file_digests_is_refused(reference: Job, tmp_path: Path) -> None:
    """All file digests are right here: the digest over the shared tensors, which every rank agreed on, still tells."""
    job, attempt = launch_changed(reference, tmp_path, momentum)
    try:
        result = attempt.wait(120)
    finally:
        job.close()
    assert result.cause is not Cause.COMPLETED
    assert "digest of the shared tensors" in str(result.message)
