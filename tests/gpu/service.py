"""Real services (SQLite) for the rows that run jobs, and what they do with a job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet_store.read.compare import compare
from tests.gpu.work import Work
from tests.support.fork_server import LIBRARIES, RANKS
from tests.support.server import Server, rank_pid, wait_for

ROOT: Final = Path(__file__).parents[2]
TWIN: Final = "twin"
"""The launcher of two nodes on this machine: two ranks that share one GPU, over gloo."""
_PLUGIN: Final = ROOT / "tests" / "support" / "plugin"


@contextmanager
def serving(work: Work, name: str = "", *, twin: bool = False) -> Iterator[Server]:
    """A service of the row's own, ``twin``: with the launcher of that name. On the CPU it, its agents and ranks are forked from
    processes that have made their imports, as in all tests; not where the launcher must be found."""
    home, options, prefix = work.folder / f"service-{name}", list[str](), tuple[str, ...]()
    if twin:
        path = os.pathsep.join([str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
        file = work.folder / f"launchers-{name}.json"
        file.write_text(json.dumps({"local": {}, TWIN: {"slots": False}}))
        options, prefix = ["--launchers", str(file)], ("env", f"PYTHONPATH={path}")
    agents = RANKS if work.size == "cheap" else LIBRARIES
    server = Server(home, *options, afresh=twin or work.device == "cuda", agents=agents, prefix=prefix)
    try:
        yield server.start()
    finally:
        server.stop()


def world(work: Work, *, shared: bool = False) -> dict[str, Any]:
    """Parts of a spec: on the CPU two ranks, on a GPU one, and with ``shared`` two of them over gloo on one device."""
    out: dict[str, Any] = {"resources": {"cpus_per_rank": 1}, "policy": {"backoff": 0.1, "max_failures": 3}, "seed": 7}
    if shared:
        out |= {"launcher": {"kind": TWIN}, "ddp": {"backend": "gloo"}}
        return out | {"world": {"nodes": 2, "ranks_per_node": 1, "device": work.device}}
    return out | {"world": {"ranks_per_node": 1 if work.device == "cuda" else 2, "device": work.device}}


def ranks_of(spec: dict[str, Any]) -> int:
    return int(spec["world"].get("nodes", 1)) * int(spec["world"]["ranks_per_node"])


@dataclass(frozen=True)
class Ended:
    """A job that has succeeded: its attempts as the API shows them, and its final checkpoint."""

    attempts: list[dict[str, Any]]
    checkpoint: Path


def finished(
    server: Server, spec: dict[str, Any], kill_at: int | None, seconds: float, *, parked: bool = False
) -> Ended:
    """Run a job to its end; each wait may take ``seconds``. With ``kill_at`` its last rank is killed with SIGKILL once it has
    done that step and what was due by then is saved; with ``parked``, once also an agent is parked for the next attempt."""
    job_id = server.submit(spec)
    if kill_at is not None:
        _, paths = server.wait_step(job_id, kill_at, deadline=seconds, saved=True)
        last = rank_pid(paths, ranks_of(spec) - 1)
        if parked:
            os.kill(last, signal.SIGSTOP)  # imports at a low priority get little of cores on which a job trains
            wait_for(lambda: server.call("GET", "/v1/fleet").json()["parked"]["ready"], "a parked agent", seconds)
        os.kill(last, signal.SIGKILL)
    job = server.wait_phase(job_id, "SUCCEEDED", deadline=seconds)
    return Ended(server.attempts(job_id), server.paths.job(job_id).checkpoints / str(job["last_checkpoint"]))


def breaches(whole: Ended, killed: Ended) -> tuple[list[str], str]:
    """Where the killed job is not as the undisturbed one; and what was seen."""
    problems = []
    for job, expected in ((whole, ["completed"]), (killed, ["rank-killed", "completed"])):
        causes = [attempt["cause"] for attempt in job.attempts]
        if causes != expected:
            problems.append(f"attempts ended as {causes}, not {expected}")
    last = killed.attempts[-1]
    report, step = last["resume_report"] or {}, (last["base"] or {}).get("step")
    if report.get("verdict") != "exact" or not step:
        problems.append(f"resumed {report.get('verdict')} from step {step}: {report}")
    if last["redone"]["first_difference"] is not None:
        problems.append(last["proof"])
    comparison = compare(whole.checkpoint, killed.checkpoint)
    if not comparison.identical:
        names = [tensor.name for tensor in comparison.different] + [
            f"rank {d.rank}{d.pointer}" for d in comparison.states
        ]
        problems.append(f"{len(names)} differences: {', '.join(names[:5])}")
    if not comparison.tensors:
        problems.append("nothing was compared")
    return problems, f"identical, {len(comparison.tensors)} tensors; resumed from step {step}: {last['proof']}"
