"""Ordinary loops (``session.prepare``, ``session.epochs``), killed in an epoch, at its last batch and between two epochs: the
bits of the same script under torch alone.

Two kinds of loader by default; RATCHET_TEST_OPTIONS=all: all of them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ratchet_contract.phases import Cause
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare, render
from tests.support.full_matrix import FULL
from tests.support.launch import Job
from tests.support.optional_packages import skip_if_missing
from tests.support.plain_torch_runs import load_weights, run_plain

CODE = Path(__file__).parents[3] / "support" / "loop_job"
BATCHES: Final = {"distributed": 6, "weighted": 7, "buckets": 6, "workers": 7, "persistent": 7}
"""Of an epoch, or the least of one."""


EXAMPLE = Path(__file__).parents[4] / "examples" / "ordinary_loop"


def job(tmp_path: Path, kind: str, places: list[str], **spec: Any) -> Job:
    (tmp_path / "out").mkdir(exist_ok=True)
    script = ["train.py", kind, str(tmp_path / "out"), *places]
    return Job(tmp_path / "home", {"script": script, "code": {"path": str(CODE)}, **spec}, CODE)


def places_of(kind: str) -> list[str]:
    """In an epoch, at the last batch of one, between two, at the first batch of one."""
    draw, last = random.Random(kind), BATCHES[kind] - 1
    return [f"{draw.randrange(2)}.{draw.randrange(3, last)}", f"1.{last}", "1.end", "2.0"]


@pytest.mark.parametrize("kind", BATCHES if FULL else ["weighted", "persistent"])
def test_killed_epoch_loop_ends_as_under_plain_torch(jobs: list[Job], tmp_path: Path, kind: str) -> None:
    every = 1 if kind == "weighted" else 3
    spec = {"checkpoint": {"every_steps": every, "first": "off"}, "determinism": "strict"}
    places = places_of(kind)
    jobs.append(job(tmp_path, kind, places, **spec))
    jobs[0].run_killed(len(places))
    reports = [attempt.report() for attempt in jobs[0].attempts[1:]]
    assert [report.verdict for report in reports] == ["exact"] * len(reports), reports
    assert all("data: position restored" in report.notes for report in reports)
    (tmp_path / "plain").mkdir()
    run_plain(CODE / "train.py", kind, tmp_path / "plain")
    for mine, theirs in zip(load_weights(tmp_path / "out"), load_weights(tmp_path / "plain"), strict=True):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def variant(tmp_path: Path, name: str, *arguments: str, determinism: str = "strict") -> Job:
    spec = {
        "script": ["variants.py", *arguments],
        "code": {"path": str(CODE)},
        "checkpoint": {"every_steps": 3, "first": "off"},
        "determinism": determinism,
    }
    return Job(tmp_path / name, spec, CODE, job_id="job")


def test_broken_off_epochs_over_a_stream_resume_exactly(jobs: list[Job], tmp_path: Path) -> None:
    jobs += [variant(tmp_path, "whole", "early"), variant(tmp_path, "killed", "early", "2.5")]
    whole, killed = jobs
    first = whole.launch(), killed.launch()
    assert [one.wait(120).cause for one in first] == [Cause.COMPLETED, Cause.RANK_KILLED], killed.attempts[0].logs()
    resumed = killed.launch()
    assert resumed.wait(120).cause is Cause.COMPLETED, resumed.logs()
    report = resumed.report()
    # Of epochs of 5 batches, broken off, and 7: step 15 is the third of epoch 2.
    assert (report.base.step, report.verdict) == (15, "exact"), report
    assert "data: skipped 3 batches" in report.notes
    comparison = compare(whole.newest(), killed.newest())
    assert comparison.identical, render(comparison)
    assert whole.newest().name.startswith("step-000000000026") and read_manifest(whole.newest()).finished
    assert resumed.metrics()[16]["number"] == 3 and {**first[1].metrics(), **resumed.metrics()} == first[0].metrics()


def test_plain_enumerate_is_named_and_refused_under_strict(jobs: list[Job], tmp_path: Path) -> None:
    jobs += [variant(tmp_path, "strict", "bar"), variant(tmp_path, "warn", "bar", "0.5", determinism="warn")]
    strict, warn = (job.launch() for job in jobs)
    assert strict.wait(120).cause is Cause.USER_ERROR
    assert "write session.enumerate(...)" in strict.paths.log(0).read_text().lower()
    assert warn.wait(120).cause is Cause.RANK_KILLED, warn.logs()
    assert [m.type for m in warn.messages(kind="note")].count("batches-renumbered") == 1
    resumed = jobs[1].launch()
    assert resumed.wait(120).cause is Cause.COMPLETED, resumed.logs()
    assert {c.component for c in resumed.report().components if c.status != "exact"} == {"data"}


@skip_if_missing("sklearn")
def test_epoch_loop_example_prints_the_same_as_the_plain_script(jobs: list[Job], tmp_path: Path) -> None:
    spec = {"script": ["train.py", "--epochs", "2"], "code": {"path": str(EXAMPLE)}}
    jobs.append(Job(tmp_path, spec, EXAMPLE))
    attempt = jobs[0].launch()
    assert attempt.wait(120).cause is Cause.COMPLETED, attempt.logs()
    printed = run_plain(EXAMPLE / "plain.py", "--epochs", "2")
    said = [line for line in printed.splitlines() if line.startswith("epoch ")]
    assert len(said) == 2 and [line for line in attempt.paths.log(0).read_text().splitlines() if line in said] == said
    assert attempt.metrics().keys() == set(range(1, 2 * 23 + 1))
