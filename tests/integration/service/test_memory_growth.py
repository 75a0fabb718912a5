"""A service that has seen many jobs holds no more than one that has seen few. RATCHET_TEST_JOBS sets how many (default 40); with
10000 about twenty minutes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause, JobPhase
from ratchet_contract.protocol.messages import AgentFile, AttemptResult
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher
from tests.support.control_plane import Plane
from tests.support.server import wait_for

pytestmark = pytest.mark.takes_turns

JOBS = int(os.environ.get("RATCHET_TEST_JOBS", "40"))


class OverAtOnce(LocalLauncher):
    """Its agents have begun and ended by the time they are asked for. Nothing but the process is missing."""

    def submit(self, plan: LaunchPlan) -> None:
        node = plan.ref.paths.node(0)
        node.root.mkdir(parents=True, exist_ok=True)
        at = utc_now().isoformat()
        result = AttemptResult(
            job_id=plan.ref.job_id, attempt=plan.ref.attempt, cause=Cause.USER_ERROR, rank=0, exit_code=78,
            message="no such task", last_step=0, started_at=at, ended_at=at, ranks=[],
        )  # fmt: skip
        node.lock_file.touch()
        node.result_file.write_text(result.model_dump_json())
        node.agent_file.write_text(AgentFile(pid=2**22 + 1, start_time=1, host="here").model_dump_json())


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database, cpu_slots=64)
    yield made
    made.close()


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ours() -> int:
    """Objects of Ratchet's own classes that are alive. The server's and those of pools of threads come and go as they like."""
    gc.collect()
    return sum(str(type(item).__module__).startswith("ratchet_") for item in gc.get_objects())


@pytest.mark.timeout(7200)
def test_service_memory_does_not_grow_with_ended_jobs(control_plane: Plane) -> None:
    control_plane.serve_api()
    control_plane.start_reconciler(OverAtOnce(control_plane.paths))

    def run(jobs: int) -> tuple[int, int]:
        last = [control_plane.submit(name="gone") for _ in range(jobs)]
        for job_id in last:
            wait_for(lambda job_id=job_id: control_plane.job(job_id).phase is JobPhase.FAILED, "its end", 120)
        return ours(), resident()

    few = max(1, JOBS // 5)
    run(JOBS - 2 * few)  # caches fill
    middle, memory = run(few)
    _, after = run(few)
    print(f"{JOBS} jobs: {(after - memory) / 1e6:+.1f} MB resident over the last {few}")
    # The threads that end attempts hold some for a moment after the rows say so.
    wait_for(lambda: ours() - middle < few // 2, f"no object more than the {middle} of {few} jobs before", 30)
    if JOBS >= 1000:  # less is lost in what the allocator keeps
        assert after - memory < 2000 * few, f"{(after - memory) / few:.0f} bytes more for each job"
