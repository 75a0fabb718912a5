"""A script that trains in a thread of its own: stopped, resumed and failing as one that trains in the main one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause, Desired
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare, render
from tests.support.launch import Attempt, Job
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
if "leave" not in sys.argv:
    thread.join()
"""
# The parts of a script, by how it goes wrong or looks as if it did. ``train`` does the steps; all in one rank.
_TRAIN = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from ratchet_worker.session import Session

def train(s, total=8, fail=None, leave=None):
    if fail == "before":
        raise ValueError("wrong in a thread")
    net = torch.nn.Linear(4, 2)
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    s.register(optimizer=optimizer)
    for step in s.steps(total):
        if step == fail:
            raise ValueError("wrong in a thread")
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == leave:
            break

def in_block(**how):
    with Session() as s:
        train(s, **how)

def run(target, *args, **kwargs):
    thread = threading.Thread(target=target, args=args, kwargs=kwargs)
    thread.start()
    return thread
"""
_NO_SUCCESS = "the thread that does the steps ended after step"
_FAILS = {
    "the main thread made the Session": ("run(train, Session(), fail=3).join()", "ValueError: wrong in a thread"),
    "before the first step": ("run(train, Session(), fail='before').join()", "ValueError: wrong in a thread"),
    "the main thread has the block": (
        "with Session() as s:\n    run(train, s, fail=3).join()", "ValueError: wrong in a thread"
    ),
    "another excepthook": (
        "threading.excepthook = lambda args: None\nrun(in_block, fail=3).join()", _NO_SUCCESS
    ),
    "another excepthook, the main thread has the block": (
        "threading.excepthook = lambda args: None\nwith Session() as s:\n    run(train, s, fail=3).join()", _NO_SUCCESS
    ),
    "a pool that nobody asks": ("pool = ThreadPoolExecutor(1)\npool.submit(in_block, fail=3)", _NO_SUCCESS),
    "a break without an end": ("run(train, Session(), leave=2).join()", _NO_SUCCESS),
    "stderr is closed": ("sys.stderr.close()\nrun(in_block, fail=3).join()", "ValueError: wrong in a thread"),
    "the main thread does not end": (
        "run(in_block, fail=3)\nwhile True:\n    time.sleep(0.05)", "ValueError: wrong in a thread"
    ),
    "sys.exit behind the block": (
        "def main():\n    in_block()\n    sys.exit('no')\nrun(main).join()", "the script ended with sys.exit('no')"
    ),
    "a missing module": ("def main():\n    import not_there\nrun(main).join()", "needs the module 'not_there'"),
}  # fmt: skip
_SUCCEEDS = {
    "an idle pool": "pool = ThreadPoolExecutor(1)\npool.submit(in_block).result()",
    "an idle pool, without a block": "pool = ThreadPoolExecutor(1)\npool.submit(lambda: train(Session())).result()",
    "an idle pool, the main thread has the block": (
        "pool = ThreadPoolExecutor(1)\nwith Session() as s:\n    pool.submit(train, s).result()"
    ),
    "sys.exit behind the block": "def main():\n    in_block()\n    sys.exit(0)\nrun(main).join()",
    "sys.exit behind a break": "def main():\n    in_block(leave=2)\n    sys.exit()\nrun(main).join()",
    "the main thread has the block": "with Session() as s:\n    run(train, s)",
    "nobody has a block": "run(train, Session())",
    "a daemon that waits for more": (
        "import queue\nwork = queue.Queue()\n"
        "def loop():\n    while True:\n        work.get()()\n        work.task_done()\n"
        "work.put(lambda: train(Session()))\nthreading.Thread(target=loop, daemon=True).start()\nwork.join()"
    ),
}
Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    jobs: list[Job] = []
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(_SCRIPT)

    def made(name: str, *arguments: str, script: str = "train.py", ranks: int = 2) -> Job:
        spec = {
            "script": [script, *arguments], "code": {"path": str(project)}, "hook": {"name": "allreduce"},
            "checkpoint": {"every_steps": 100}, "determinism": "strict",
            "world": {"ranks_per_node": ranks, "device": "cpu"},
        }  # fmt: skip
        jobs.append(Job(tmp_path, spec, project, job_id=name))
        return jobs[-1]

    yield made
    for job in jobs:
        job.close()


def test_stop_of_training_in_a_thread_resumes_exactly(make: Make) -> None:
    whole, cut = make("whole", "leave"), make("cut", "hold")
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()

    attempt = cut.launch()
    work = cut.paths.work_dir
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


def test_error_in_the_training_thread_fails_the_attempt(make: Make) -> None:
    attempt = make("failing", "fail").launch()
    result = attempt.wait()
    assert result.cause is Cause.EXCEPTION and "wrong in a thread" in result.message, attempt.logs()


def _launch(make: Make, tmp_path: Path, name: str, ending: str) -> Attempt:
    """A job of one rank, whose script is ``_TRAIN`` with this ``ending``."""
    script = name.replace(" ", "-") + ".py"
    (tmp_path / "project" / script).write_text(_TRAIN + ending)
    return make(script, script=script, ranks=1).launch()


def test_failed_training_in_a_thread_fails_the_attempt(make: Make, tmp_path: Path) -> None:
    attempts = {name: _launch(make, tmp_path, name, ending) for name, (ending, _) in _FAILS.items()}
    for name, (_, message) in _FAILS.items():
        result = attempts[name].wait()
        found = result.cause is not Cause.COMPLETED and message in (result.message or "")
        assert found, f"{name}: {result}\n{attempts[name].logs()}"


def test_completed_training_in_a_thread_completes_the_attempt(make: Make, tmp_path: Path) -> None:
    attempts = {name: _launch(make, tmp_path, name, ending) for name, ending in _SUCCEEDS.items()}
    for name, ending in _SUCCEEDS.items():
        result = attempts[name].wait()
        steps = 3 if "leave=2" in ending else 8
        found = (result.cause, result.last_step) == (Cause.COMPLETED, steps)
        assert found, f"{name}: {result}\n{attempts[name].logs()}"
        manifest = read_manifest(attempts[name].job.newest())
        assert (manifest.step, manifest.finished) == (steps, True), name


def test_stop_ends_a_main_thread_that_never_returns(make: Make, tmp_path: Path) -> None:
    ending = "run(lambda: train(Session(), total=None))\nwhile True:\n    time.sleep(0.02)"
    attempt = _launch(make, tmp_path, "stopped", ending)
    attempt.wait_step(2)
    attempt.control(desired=Desired.SUSPEND)
    assert attempt.wait().cause is Cause.API_SUSPEND, attempt.logs()
