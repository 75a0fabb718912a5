"""A stop that comes when the last step is done, and the script is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server import Server, wait_for

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from ratchet import Session

here = Path(sys.argv[1])
with Session() as session:
    net = torch.nn.Linear(2, 1)
    model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in session.steps(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    (here / "trained").touch()
    deadline = time.monotonic() + 60
    while not (session.resumed or session.should_stop) and time.monotonic() < deadline:
        time.sleep(0.05)
(here / "result").write_text(str(net.weight.tolist()))
"""


@pytest.mark.slow
def test_script_stopped_after_last_step_is_completed_by_next_attempt(server: Server, tmp_path: Path) -> None:
    project, here = tmp_path / "project", tmp_path / "here"
    project.mkdir()
    here.mkdir()
    (project / "train.py").write_text(SCRIPT)
    job = server.submit(
        {
            "name": "stopped-at-the-end",
            "script": ["train.py", str(here)],
            "code": {"path": str(project)},
            "world": {"ranks_per_node": 1, "device": "cpu"},
        }
    )
    wait_for(lambda: (here / "trained").exists(), "the last step")
    server.call("POST", f"/v1/jobs/{job}/preempt", json={})
    server.wait_phase(job, "SUCCEEDED")
    assert (here / "result").exists()
    assert [attempt["cause"] for attempt in server.attempts(job)] == ["api-preempt", "completed"]
