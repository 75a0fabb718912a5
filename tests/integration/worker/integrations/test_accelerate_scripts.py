"""Scripts of Accelerate under ``ratchet.accelerate``, killed at five places: the weights, and the saved states, of the same
script under Accelerate alone.

One kind of script by default; RATCHET_TEST_OPTIONS=all: all of them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from ratchet_contract.checkpoint.resume_report import ResumeReport
from tests.support.fork_server import LIBRARIES
from tests.support.full_matrix import FULL
from tests.support.launch import Job
from tests.support.optional_packages import skip_if_missing
from tests.support.pickle_reader import read_pickled
from tests.support.plain_torch_runs import load_weights, run_plain

pytestmark = skip_if_missing("accelerate")

CODE: Final = Path(__file__).parents[3] / "support" / "loop_job"
BATCHES: Final = {"accumulated": 6, "workers": 6, "left early": 5}
"""Of an epoch, or the least of one."""


def places_of(kind: str) -> list[str]:
    """Drawn: two within an accumulation of three batches; at an epoch's last batch, between two, and at the first of one."""
    draw, last = random.Random(kind), BATCHES[kind] - 1
    return [f"0.{draw.choice((0, 1))}", f"1.{draw.choice((3, 4))}", f"1.{last}", "1.end", f"{draw.choice((2, 3))}.0"]


def states(out: Path) -> dict[str, Any]:
    """What ``save_state`` has written, by file."""
    found = {}
    for path in sorted((out / "states").rglob("*.*")):
        safe = path.suffix == ".safetensors"
        found[str(path.relative_to(out))] = plainly(load_file(path) if safe else read_pickled(path))
    return found


def plainly(value: Any) -> Any:
    """To be compared bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plainly(item) for key, item in value.items()}
    return [plainly(item) for item in value] if isinstance(value, list | tuple) else repr(value)


@pytest.mark.parametrize("kind", BATCHES if FULL else ["accumulated"])
def test_killed_accelerate_script_ends_as_under_plain_accelerate(jobs: list[Job], tmp_path: Path, kind: str) -> None:
    places = places_of(kind)
    reports = killed_and_plain(jobs, tmp_path, kind, places)
    assert [report.verdict for report in reports] == ["exact"] * len(reports) and len(reports) >= 4, reports
    logged = [attempt.metrics() for attempt in jobs[0].attempts]
    assert sum("accuracy" in values for at in logged for values in at.values()) >= 4


def test_job_begins_with_load_state_but_resumes_from_own_checkpoint(jobs: list[Job], tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    run_plain(CODE / "accelerated.py", "accumulated", tmp_path / "before", interpreters=LIBRARIES)
    state = tmp_path / "before" / "states" / "checkpoints" / "checkpoint_3"
    reports = killed_and_plain(jobs, tmp_path, "accumulated", ["1.4"], BEGIN_WITH=str(state))
    assert [report.verdict for report in reports] == ["exact"]
    said = [[note.message for note in attempt.messages(kind="note")] for attempt in jobs[0].attempts]
    told = [[text for text in texts if "load_state" in text] for texts in said]
    assert told == [
        [f"load_state({str(state)!r}): the job begins with this state, at the first batch of epoch 0"],
        [f"load_state({str(state)!r}) is skipped: the job continues from its own step {reports[0].base.step}"],
    ]


def killed_and_plain(
    jobs: list[Job], tmp_path: Path, kind: str, places: list[str], **variables: str
) -> list[ResumeReport]:
    """A job that is killed at ``places`` leaves what the script leaves by itself. Its resumes from a checkpoint."""
    spec = {
        "env": variables,
        "script": ["accelerated.py", kind, str(tmp_path / "killed"), *places],
        "code": {"path": str(CODE)},
        "checkpoint": {"every_steps": 2 if kind == "workers" else 1, "first": "off"},
        "determinism": "strict",
    }
    for name in ("killed", "plain"):
        (tmp_path / name).mkdir()
    jobs.append(Job(tmp_path / "home", spec, CODE, interpreters=LIBRARIES))
    jobs[0].run_killed(len(places))
    run_plain(CODE / "accelerated.py", kind, tmp_path / "plain", interpreters=LIBRARIES, **variables)
    for mine, theirs in zip(load_weights(tmp_path / "killed"), load_weights(tmp_path / "plain"), strict=True):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    saved, expected = states(tmp_path / "killed"), states(tmp_path / "plain")
    assert saved.keys() == expected.keys() and len(saved) > 8
    assert [name for name in saved if saved[name] != expected[name]] == []
    return [attempt.report() for attempt in jobs[0].attempts if attempt.report().base.step]


def test_unsupported_accelerate_options_are_refused_by_name(jobs: list[Job], tmp_path: Path) -> None:
    spec = {"script": ["accelerate_refusals.py"], "code": {"path": str(CODE)}}
    jobs.append(Job(tmp_path, spec, CODE, interpreters=LIBRARIES))
    attempt = jobs[0].launch()
    attempt.wait(120)
    said = [line for line in attempt.paths.log(0).read_text().splitlines() if line.startswith("refused: ")]
    expected = [
        "DistributedDataParallelKwargs: hook and DDP's settings are those of the job's spec",
        "InitProcessGroupKwargs: the Session starts the process group",
        "dynamo_backend, dynamo_plugin: pass prepare a compiled model",
        "use_stateful_dataloader: the Session saves",
        "dispatch_batches: every rank of a job",
        "even_batches: False gives ranks different numbers",
        "epochs() iterates over the loader",
        "skip_first_batches of the training's DataLoader",
        "join_uneven_inputs: all ranks",
        "the prepared loader is iterated outside of an epoch",
        "call load_state before the first step",
        *["accelerator.backward() without a batch of the training DataLoader"] * 2,
        "epoch 0 trained without a batch of the prepared loader",
    ]
    assert [(e, s) for e, s in zip(expected, said, strict=True) if e not in s] == []
