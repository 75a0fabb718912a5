"""Numeric problems of a hook in a job, as the job's events show them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from ratchet_contract.phases import Cause
from tests.support.launch import Job

SCRIPT = """
import torch
from ratchet_worker.session import Session

with Session() as s:
    net = torch.nn.Linear(16, 16)
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    s.register(optimizer=optimizer)
    for step in s.steps(6):
        scale = 1e9 if step >= 4 else 1.0
        (model(torch.ones(1, 16)).sum() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_overflow_and_lasting_infinity_are_reported_once_per_parameter(tmp_path: Path, jobs: list[Job]) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    hook = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "wrapper": "fp16"}
    world = {"ranks_per_node": 1, "device": "cpu"}
    job = Job(tmp_path, {"script": ["train.py"], "code": {"path": str(code)}, "hook": hook, "world": world}, code)
    jobs.append(job)
    attempt = job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    notes = [note for note in attempt.notes() if note.type.startswith("hook-")]
    kinds = product(("hook-fp16-overflow", "hook-non-finite"), ("bias", "weight"))
    assert sorted((note.type, note.data["parameter"]) for note in notes) == [*kinds]
    assert all(note.message in attempt.logs() for note in notes)
