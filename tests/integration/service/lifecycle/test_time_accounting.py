"""What is told of a job beside its causes: where its time went, the notice of a stop, its pace, what its exit codes meant."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ratchet_contract.phases import JobPhase
from ratchet_contract.protocol.messages import LaunchFile
from tests.support.control_plane import Plane
from tests.support.tokens import bearer

pytestmark = pytest.mark.takes_turns

PARTS = ("queued", "launching", "useful", "lost", "stall", "stopping", "unseen")
RULES = [{"codes": [code], "action": action} for code, action in ((42, "retry"), (43, "fail"), (44, "preempted"))]


def get(plane: Plane, path: str) -> Any:
    url = json.loads(plane.paths.service_file.read_text())["url"]
    answer = httpx.get(url + path, timeout=30, verify=False, headers=bearer(plane.token))
    assert answer.is_success, answer.text
    return answer.json()


def whole(goodput: dict[str, float]) -> float:
    """Its wall-clock seconds, which its parts add up to."""
    parts = [goodput[f"{name}_seconds"] for name in PARTS]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(goodput["wall_seconds"], abs=0.01), goodput
    return goodput["wall_seconds"]


def test_job_accounts_goodput_stop_notice_pace_and_exit_code_rules(control_plane: Plane) -> None:
    control_plane.start_reconciler()
    faults = {
        "1": {"at": 14, "do": "exit-44"}, "2": {"at": 25, "do": "exit-42"}, "3": {"at": 35, "do": "wait"},
        "4": {"at": 95, "do": "exit-43"},
    }  # fmt: skip
    job_id = control_plane.submit(
        {"steps": 120, "pause": 0.02, "epochs": faults}, policy={"exit_codes": RULES, "max_failures": 1}
    )
    control_plane.wait_job(job_id, lambda job: job.attempt == 3 and job.step >= 35, "in its third attempt")
    control_plane.post(f"/v1/jobs/{job_id}/suspend")
    control_plane.wait(job_id, JobPhase.SUSPENDED)
    control_plane.post(f"/v1/jobs/{job_id}/resume")
    job = control_plane.wait(job_id, JobPhase.FAILED)

    view = get(control_plane, f"/v1/jobs/{job_id}")
    attempts = get(control_plane, f"/v1/jobs/{job_id}/attempts")["items"][::-1]
    assert [(a["cause"], a["outcome"], a["exit_code"]) for a in attempts] == [
        ("exception", "preempted", 44), ("exception", "failed", 42), ("api-suspend", "suspended", 143),
        ("exception", "failed", 43),
    ]  # fmt: skip
    assert (job.preemptions, job.failures) == (1, 1)  # the failure is the last one: 42 counted against nothing
    assert view["reason"] == "exit-code" and "exit code 43: fail, by policy.exit_codes[1]" in view["message"]
    rules = [e.data.get("rule") for e in control_plane.events(job_id) if e.type == "attempt-ended"]
    told = [(44, "preempted", 2), (42, "retry", 0), None, (43, "fail", 1)]
    text = "exit code {}: {}, by policy.exit_codes[{}]"
    assert rules == [None if rule is None else text.format(*rule) for rule in told]

    assert job.ended_at is not None and job.paused_seconds > 0
    wall = (job.ended_at - job.created_at).total_seconds() - job.paused_seconds
    assert whole(view["goodput"]) == pytest.approx(wall, abs=0.01)
    assert sum(whole(a["goodput"]) for a in attempts) <= wall + 0.01
    assert [a["goodput"]["lost_seconds"] > 0 for a in attempts] == [True, True, False, True]
    for a in attempts:
        spent, done = a["goodput"], a["steps_done"]
        share = spent["lost_seconds"] / (spent["lost_seconds"] + spent["useful_seconds"])
        assert share == pytest.approx(a["steps_lost"] / done, abs=0.01)
    stopped = attempts[2]
    assert stopped["stop_at"] is not None and stopped["notice_seconds"] == 120
    assert 0 <= stopped["notice_used"] <= stopped["goodput"]["stopping_seconds"] + 0.01
    assert [a["notice_used"] for a in (attempts[0], attempts[1])] == [None, None]

    first, last = (
        _pace(control_plane, job_id, number) for number in (1, 4)
    )  # the third stayed until its agent had seen a step of it
    assert first is None and last is not None and 0 < (last.startup or 0) < 60


def _pace(plane: Plane, job_id: str, number: int) -> Any:
    path = plane.attempt_paths(job_id, number).launch_file
    return LaunchFile.model_validate_json(path.read_bytes()).pace
