"""A rank for which the others wait is named; equal ranks are not. The ranks are real ones of a gloo group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_service.lifecycle.stragglers import WINDOWS
from tests.support.server import Server, wait_for

# ``slow`` is a rank and a place in the step. It is slow until the file ``hurry`` is there. No rank takes a whole core.
TRAIN = """
import sys
import time
from pathlib import Path

import torch

from ratchet_worker.session import Session

hurry, slow, place = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def batches(rank):
    while True:
        if rank == slow and place == "data" and not hurry.exists():
            time.sleep(0.1)
        yield torch.randn(4, 8)


with Session() as s:
    net = torch.nn.Linear(8, 8)
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    s.register(optimizer=optimizer)
    s.restore()
    data = batches(s.rank)
    for step in s.steps(100000):
        loss = model(next(data)).square().mean()
        if s.rank == slow and place == "backward" and not hurry.exists():
            time.sleep(0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    try:
        yield server.start()
    finally:
        server.stop()


def spec(folder: Path, slow: int, place: str) -> dict[str, Any]:
    return {
        "name": f"slow-{place}",
        "script": ["train.py", str(folder / "hurry"), str(slow), place],
        "code": {"path": str(folder / "code")},
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "checkpoint": {"every_steps": 100000},
    }


def reports(server: Server, job_id: str, rank: int) -> int:
    """How many reports with step times the rank has sent."""
    file = server.paths.job(job_id).attempt(1).spool(rank)
    return file.read_text().count('"ready"') if file.exists() else 0


def named(server: Server, job_id: str) -> list[dict[str, Any]]:
    return [event for event in server.events(job_id) if event["type"] == "straggler"]


def test_slow_rank_is_named_once_and_equal_ranks_are_not(server: Server, tmp_path: Path) -> None:
    """All three jobs run at the same time, so that the equal ranks have noise."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(TRAIN)
    backward = server.submit(spec(tmp_path, 1, "backward"))
    data = server.submit(spec(tmp_path, 0, "data"))
    equal = server.submit(spec(tmp_path, -1, "nowhere"))
    for job_id, rank in ((backward, 1), (data, 0)):
        (event,) = wait_for(lambda job_id=job_id: named(server, job_id), "the slow rank to be named", 90)
        assert (event["attempt"], event["data"]["rank"], event["data"]["node"]) == (1, rank, 0)
        assert event["data"]["host"] and event["data"]["host"] in event["message"]
        assert event["data"]["ready_seconds"] > 0.1 > event["data"]["others_seconds"]
        assert 0.3 < event["data"]["share"] <= 1
        (attempt,) = server.attempts(job_id)
        assert [one["rank"] for one in attempt["stragglers"]] == [rank]
    done = {job_id: reports(server, job_id, 1) for job_id in (backward, data)}
    wait_for(
        lambda: (
            min(reports(server, equal, rank) for rank in (0, 1)) >= 2 * WINDOWS
            and all(reports(server, job_id, 1) > count + 1 for job_id, count in done.items())
        ),
        "more reports",
        90,
    )
    assert len(named(server, backward)) == len(named(server, data)) == 1
    assert named(server, equal) == [] and server.attempts(equal)[0]["stragglers"] == []
