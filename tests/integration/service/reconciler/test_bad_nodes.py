"""A job whose attempts die again and again on one machine starts on another one, and its history says so."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet_contract.phases import Cause, JobPhase
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher
from tests.support.control_plane import Plane, trainer_launcher

pytestmark = pytest.mark.takes_turns

DIES_TWICE = {"steps": 25, "epochs": {str(n): {"at": 20 + n, "do": "kill-agent"} for n in (1, 2)}}


class Machines(LocalLauncher):
    """An engine with the machines ``names``, which starts each attempt on the first that is not excluded."""

    excludes_nodes = True
    slots = False
    names = ("m1", "m2")

    def _start(self, plan: LaunchPlan, node: int, env: dict[str, str]) -> int:
        free = [name for name in self.names if name not in plan.launch.exclude_nodes]
        return super()._start(plan, node, {**env, "RATCHET_NODE_NAME": free[node]})


def views(plane: Plane, job_id: str) -> list[Any]:
    return sorted(plane.get(f"/v1/jobs/{job_id}/attempts")["items"], key=lambda attempt: attempt["number"])


def hosts(plane: Plane, job_id: str) -> list[str]:
    return [attempt["nodes"][0]["host"] for attempt in views(plane, job_id)]


def test_third_attempt_leaves_the_machine_on_which_two_have_died(control_plane: Plane) -> None:
    engine = trainer_launcher(control_plane.paths, Machines)
    engine.names = ("m2",)
    control_plane.start_reconciler(engine)
    control_plane.wait(control_plane.submit({"steps": 5}), JobPhase.SUCCEEDED)  # from now on, m2 is known
    engine.names = ("m1", "m2")
    job_id = control_plane.submit(DIES_TWICE)
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert [attempt.cause for attempt in control_plane.attempts(job_id)] == [Cause.UNKNOWN] * 2 + [Cause.COMPLETED]
    assert hosts(control_plane, job_id) == ["m1", "m1", "m2"]
    (event,) = [event for event in control_plane.events(job_id) if event.type == "node-excluded"]
    assert (event.attempt, event.data["node"], event.data["attempts"]) == (3, "m1", [1, 2])
    assert event.data["causes"] == ["agent-lost"] * 2 and event.data["until"] and "m1 is not used" in event.message
    assert [attempt["excluded_nodes"] for attempt in views(control_plane, job_id)] == [[], [], ["m1"]]
    (of_m1,) = [host for host in control_plane.get("/v1/fleet")["hosts"] if host["host"] == "m1"]
    assert of_m1["faults"] == {"agent-lost": 2}


def test_switched_off_or_without_another_known_machine_nothing_is_excluded(control_plane: Plane) -> None:
    engine = trainer_launcher(control_plane.paths, Machines)
    control_plane.start_reconciler(engine)
    alone = control_plane.submit(DIES_TWICE)
    control_plane.wait(alone, JobPhase.SUCCEEDED)
    engine.names = ("m2",)
    control_plane.wait(control_plane.submit({"steps": 5}), JobPhase.SUCCEEDED)
    engine.names = ("m1", "m2")
    off = control_plane.submit(DIES_TWICE, policy={"exclude_nodes": "off"})
    control_plane.wait(off, JobPhase.SUCCEEDED)
    for job_id in (alone, off):
        assert hosts(control_plane, job_id) == ["m1"] * 3
        assert not [event for event in control_plane.events(job_id) if event.type == "node-excluded"]
