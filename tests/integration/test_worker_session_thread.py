"""A script that trains in a thread of its own: stopped, resumed and failing as one that trains in the main one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause, Desired
from ratchet_store.compare import compare, render
from tests.support.launch import Job
from tests.support.server import wait_for

_SCRIPT = """
import sys, threading, time
from pathlib import Path
import torch
from ratchet_worker.session import Session

def main():
    with Session() as s:
        net = torch.nn.Linear(4, 2)
        model = s.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        s.register(optimizer=optimizer)
        for step in s.steps(16):
            Path("trains").touch()
            if step == 3 and "fail" in sys.argv:
                raise ValueError("wrong in a thread")
            if step == 8 and "hold" in sys.argv and not s.resumed:
                Path(f"../held.{s.rank}").touch()
                while not Path("../go").exists():
                    time.sleep(0.01)
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

thread = threading.Thread(target=main)
thread.start()
if "leave" in sys.argv:
    while not Path("trains").exists():
        time.sleep(0.01)
else:
    thread.join()
"""
Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    jobs: list[Job] = []
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(_SCRIPT)

    def made(name: str, *arguments: str) -> Job:
        spec = {
            "script": ["train.py", *arguments], "code": {"path": str(project)}, "hook": {"name": "allreduce"},
            "checkpoint": {"every_steps": 100}, "determinism": "strict",
        }  # fmt: skip
        jobs.append(Job(tmp_path, spec, project, job_id=name))
        return jobs[-1]

    yield made
    for job in jobs:
        job.close()


def test_a_stop_in_a_thread_is_no_success_and_the_resume_is_exact(make: Make) -> None:
    whole, cut = make("whole", "leave"), make("cut", "hold")
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()

    attempt = cut.launch()
    work = cut.paths.work
    held = [work.parent / f"held.{rank}" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() for path in held), "both ranks to be held", 60)
    attempt.control(desired=Desired.SUSPEND)
    attempt.wait_freeze(0)
    (work.parent / "go").touch()
    result = attempt.wait()
    assert (result.cause, result.last_step) == (Cause.API_SUSPEND, 9), attempt.logs()
    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    comparison = compare(whole.newest(), cut.newest())
    assert comparison.identical, render(comparison)


def test_an_error_that_ends_the_thread_ends_the_attempt(make: Make) -> None:
    attempt = make("failing", "fail").launch()
    result = attempt.wait()
    assert result.cause is Cause.EXCEPTION and "wrong in a thread" in result.message, attempt.logs()
