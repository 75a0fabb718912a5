"""Row ``parked``: the attempt after a SIGKILL starts in a parked agent, which must not have called CUDA's driver before it forks
the ranks; the job ends as an undisturbed one that has started cold."""

from __future__ import annotations

from ratchet_contract import env_vars
from tests.gpu import service
from tests.gpu.jobs_killed import KINDS
from tests.gpu.work import Work
from tests.support.server import Server


def run(work: Work) -> str:
    spec = {
        **KINDS["float16 with GradScaler"].parts(work), **service.world(work),
        "checkpoint": {"every_steps": work.sized(50, 20, 20), "keep_last": 3},
    }  # fmt: skip
    server = Server(work.folder / "service", afresh=True, variables={env_vars.STANDBY: "on"})
    try:
        server.start()
        whole = service.finished(server, {"name": "cold", **spec}, None, work.left)
        killed = service.finished(server, {"name": "parked", **spec}, work.sized(120, 30, 30), work.left, parked=True)
        starts = [_starts(server, ended) for ended in (whole, killed)]
    finally:
        server.stop()
    problems, seen = service.breaches(whole, killed)
    if starts != [[("cold", "no agent of this kind is parked yet")], [("parked", None)]]:
        problems.append(f"the newest attempts have started {starts}")
    work.judge("float16 with GradScaler", problems, seen)
    return "the attempt after the kill did not start as it should" if problems else "started in a parked agent"


def _starts(server: Server, ended: service.Ended) -> list[tuple[str, str | None]]:
    """How the ranks of the job's newest attempt have started, each way once, and why."""
    newest = ended.attempts[-1]
    events = server.call("GET", f"/v1/jobs/{newest['job_id']}/events?type=rank-started").json()["items"]
    found = [event for event in events if event["attempt"] == newest["number"]]
    return sorted({(event["data"]["start"], event["data"].get("why")) for event in found}, key=str)
