"""Jobs on streams, with DataLoader workers and buffers, killed within an epoch: the bits of those that nobody disturbed.

Two by default; RATCHET_TEST_OPTIONS=all: all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.full_matrix import FULL
from tests.support.launch import Job
from tests.support.optional_packages import missing_reason

CODE = Path(__file__).parents[3] / "support" / "stream_job"
TORCHDATA: Final = ["stateful", "nested", "nested, workers"]
KINDS: Final = [*TORCHDATA, "buffered", "noise", "pipe"]


@pytest.mark.parametrize("kind", KINDS if FULL else ["stateful", "buffered"])
def test_killed_job_on_a_stream_resumes_exactly(jobs: list[Job], tmp_path: Path, kind: str) -> None:
    if kind in TORCHDATA and (why := missing_reason("torchdata")):
        pytest.skip(why)
    spec = {"checkpoint": {"every_steps": 7, "first": "off"}, "code": {"path": str(CODE)}}
    jobs += [
        Job(tmp_path / name, {**spec, "script": ["train.py", kind, name]}, CODE, job_id="job")
        for name in ("whole", "killed")
    ]
    whole, killed = jobs
    first = whole.launch(), killed.launch()
    assert [one.wait(120).cause for one in first] == [Cause.COMPLETED, Cause.RANK_KILLED], killed.attempts[0].logs()
    resumed = killed.launch()
    assert resumed.wait(120).cause is Cause.COMPLETED, resumed.logs()
    report = resumed.report()
    assert (report.base.step, report.verdict) == (14, "exact"), report
    comparison = compare(whole.newest(), killed.newest())
    assert comparison.tensors and comparison.digest_a == comparison.digest_b, render(comparison)
    # A pipe's generator is seeded by the system when it is made, and by each epoch before it is used.
    assert comparison.identical or kind == "pipe", render(comparison)
