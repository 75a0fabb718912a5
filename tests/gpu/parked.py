"""Row ``parked``: a job whose attempt starts in a parked agent, forked before any call of CUDA's driver, ends as one that starts
cold."""

from __future__ import annotations

import re

from tests.gpu import service
from tests.gpu.jobs_killed import KINDS
from tests.gpu.work import Work
from tests.support.server import Server, wait_for


def run(work: Work) -> str:
    server = Server(work.folder / "service", afresh=True, variables={"RATCHET_STANDBY": "processes=1"})
    spec = {**KINDS["float16 with GradScaler"].parts(work), **service.world(work)}
    try:
        server.start()
        cold = service.finished(server, {"name": "cold", **spec}, None, 120)
        wait_for(
            lambda: re.search(r"^ratchet_parked_agents 1", server.call("GET", "/metrics").text, re.M),
            "a parked agent",
            60,
        )
        parked = service.finished(server, {"name": "parked", **spec}, 20, 120)
        starts = [_starts(server, ended.attempts[0]["job_id"]) for ended in (cold, parked)]
    finally:
        server.stop()
    problems, _ = service.breaches(cold, parked)
    for problem in problems:
        work.red("a job that starts parked", problem)
    if "parked" in starts[0] or starts[1][0] != "parked":
        work.red("the starts", f"cold, then parked wanted: {starts}")
    return (
        f"starts {', '.join(map(str, starts[1]))}; the final state is that of a cold start"
        if not problems
        else "differs"
    )


def _starts(server: Server, job_id: str) -> list[str]:
    """How the attempts' first ranks have started."""
    events = server.call("GET", f"/v1/jobs/{job_id}/events?type=rank-started").json()["items"]
    return [event["data"]["start"] for event in events if event["data"]["rank"] == 0]
