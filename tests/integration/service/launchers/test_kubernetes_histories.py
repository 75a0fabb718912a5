"""What the launcher makes of histories that were recorded from a real API server, scheduler and Job controller, and of faults
that nobody recorded: those are modelled by hand (``tests/support/kube``), and are unproven on a live cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.launchers.base import AttemptRef, AttemptState, LaunchPlan
from ratchet_service.launchers.kubernetes.launcher import KubernetesLauncher, make
from ratchet_service.reconciler.launch import build_launch_file
from tests.support.engines import STRANGER
from tests.support.fake_report_service import TOKEN
from tests.support.kube import operations
from tests.support.kube.cluster import Cluster
from tests.support.kube.replay import Replay
from tests.support.kube.store import JOBS, Object
from tests.support.server import wait_for

RESOLVED = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python")


@contextmanager
def launching(home: HomePaths, kubeconfig: Path, **settings: Any) -> Iterator[KubernetesLauncher]:
    given = {"claim": "home", "url": "http://service.example", "kubeconfig": str(kubeconfig), "image": "waits:1"}
    if os.getuid() == 0:
        given |= {"run_as_user": str(STRANGER), "run_as_group": str(STRANGER)}
    made = make(home, {**given, **settings})
    try:
        yield made
    finally:
        made.close()


def planned(maker: KubernetesLauncher, home: HomePaths, number: int = 1, **spec: Any) -> LaunchPlan:
    """The first attempt of a job of two nodes."""
    job_id = f"job-{number:012d}"
    world = {"nodes": 2, "ranks_per_node": 1, "device": "cpu"}
    data = {"name": "n", "task": {"entrypoint": "a:B"}, "world": world, "launcher": {"kind": "kubernetes"}, **spec}
    home.job(job_id).root.mkdir(parents=True)
    return maker.plan(build_launch_file(home, job_id, 1, parse_spec(data), RESOLVED, (), TOKEN, Desired.RUN))


@dataclass(frozen=True)
class Expected:
    """``until``: seconds into the history. ``ends``: causes with the nodes that they are of; ``waits``: words of the reason."""

    until: float
    alive: bool = True
    ends: tuple[tuple[Cause, int | None], ...] = ()
    waits: str | None = None
    gone: tuple[int, ...] = ()
    says: str = ""

    def fits(self, state: AttemptState) -> bool:
        waits = state.waiting is None if self.waits is None else self.waits in (state.waiting or "")
        ends = tuple((end.cause, end.node) for end in state.ends)
        said = self.says in " ".join(end.message for end in state.ends)
        gone = tuple(i for i, node in enumerate(state.nodes) if node.gone)
        return (state.alive, ends, gone) == (self.alive, self.ends, self.gone) and waits and said


def both(cause: Cause) -> tuple[tuple[Cause, int | None], ...]:
    return (cause, 0), (cause, 1)


EVICTED_BY_HAND: tuple[tuple[Cause, int | None], ...] = ((Cause.EVICTED, None),)
HISTORIES: dict[str, list[Expected]] = {
    "complete": [
        Expected(0.0, waits="2 of 2 pods not made yet"),
        Expected(0.2),
        Expected(9.0, alive=False, gone=(0, 1)),
    ],
    "fail_exit1": [Expected(9.0, alive=False, ends=both(Cause.EXCEPTION), says="code 1")],
    "failjob_exit78": [Expected(0.2), Expected(9.0, alive=False, ends=both(Cause.USER_ERROR), says="code 78")],
    "evict_one": [
        Expected(0.2),
        Expected(1.697, ends=((Cause.EVICTED, 1),), says="Eviction API: evicting"),
        Expected(5.0, ends=((Cause.EVICTED, 1),)),
        Expected(6.5, alive=False, ends=((Cause.EVICTED, 1),), gone=(0,)),
    ],
    "delete_running": [
        Expected(1.2),
        Expected(1.704, ends=EVICTED_BY_HAND, says="somebody deleted the Job"),
        Expected(9.0, alive=False, ends=(*EVICTED_BY_HAND, *both(Cause.SIGTERM))),
    ],
    "suspend_resume": [
        Expected(1.2),
        Expected(1.75, ends=EVICTED_BY_HAND, waits="the Job is suspended", says="somebody suspended the Job"),
        Expected(2.1, alive=False, ends=(*EVICTED_BY_HAND, *both(Cause.SIGTERM))),
    ],
    "created_suspended_then_quota": [
        Expected(1.0, waits="waits in Kueue's queue gpus"),
        Expected(1.706, waits="2 of 2 pods not made yet"),
        Expected(2.5),
        Expected(9.0, alive=False, gone=(0, 1)),
    ],
}


@pytest.mark.parametrize("scenario", HISTORIES)
def test_launcher_interprets_recorded_cluster_histories(scenario: str, tmp_path: Path) -> None:
    home, replay = HomePaths(tmp_path / "home"), Replay(scenario, tmp_path)
    queue = {"launcher": {"kind": "kubernetes", "queue": "gpus"}} if "quota" in scenario else {}
    try:
        with launching(home, replay.kubeconfig, result_patience=0) as launcher:
            plan = planned(launcher, home, **queue)
            launcher.submit(plan)
            replay.attach(plan.ref)
            for expected in HISTORIES[scenario]:
                replay.play(expected.until)
                reach(launcher, plan.ref, expected.fits, str(expected))
            results = [result.cause for result in launcher.poll(plan.ref).results]
            succeeded = scenario in ("complete", "created_suspended_then_quota")
            assert results == [Cause.COMPLETED] * 2 if succeeded else len(results) < 2
            deleted = replay.store.find(JOBS, "default", plan.ref.name)
            if scenario == "suspend_resume":
                assert deleted is not None and replay.api.count("delete", "jobs") > 0, (
                    "it would start the same attempt again"
                )
    finally:
        replay.close()


def reach(
    launcher: KubernetesLauncher, ref: AttemptRef, fits: Callable[[AttemptState], bool], what: str
) -> AttemptState:
    def look() -> AttemptState | None:
        state = launcher.poll(ref)
        return state if fits(state) else None

    try:
        return wait_for(look, what, 30)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{launcher.poll(ref)}") from None


# --- faults modelled by hand -------------------------------------------------------------------------------------------


@dataclass
class Site:
    """A cluster whose pods' ``python`` waits to be told to end: what is asked here is how the engine's own words are read."""

    cluster: Cluster
    launcher: KubernetesLauncher
    home: HomePaths
    jobs: int = 0

    def submit(self, *, running: bool = True, **spec: Any) -> LaunchPlan:
        self.jobs += 1
        plan = planned(self.launcher, self.home, self.jobs, **spec)
        self.launcher.submit(plan)
        if running:
            wait_for(lambda: self._running(plan.ref), "the pods to run", 30)
        return plan

    def _running(self, ref: AttemptRef) -> bool:
        return [p["status"]["phase"] for p in self.cluster.pods(ref.name)] == ["Running"] * 2

    def pod(self, plan: LaunchPlan, node: int = 1) -> Object:
        return self.cluster.pods(plan.ref.name)[node]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("faults")
    home = HomePaths(folder / "home")
    home.jobs.mkdir(parents=True)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\ntrap 'exit 143' TERM\nsleep 600 &\nwait\n")
    python.chmod(0o755)
    with Cluster(folder / "cluster", claims={"home": home.home}) as cluster:
        cluster.kubelet.images.first["waits:1"] = python.parent
        with launching(home, cluster.kubeconfig, result_patience=0, fault_patience=0.5) as launcher:
            yield Site(cluster, launcher, home)


def lose(site: Site, plan: LaunchPlan) -> None:
    site.cluster.remove_node(site.pod(plan)["spec"]["nodeName"])


def delete(site: Site, plan: LaunchPlan) -> None:
    operations.delete_pod(site.cluster.store, site.cluster.namespace, site.pod(plan)["metadata"]["name"])


FAULTS: dict[str, tuple[Callable[[Site, LaunchPlan], None], Cause, str]] = {
    "evicted": (lambda site, plan: site.cluster.evict(site.pod(plan)), Cause.EVICTED, "evict"),
    "deleted": (delete, Cause.EVICTED, "somebody deleted the pod"),
    "preempted": (lambda site, plan: site.cluster.preempt(site.pod(plan)), Cause.HIGHER_PRIORITY, "priority"),
    "node pressure": (lambda site, plan: site.cluster.pressure(site.pod(plan)), Cause.EVICTED, "low on resource"),
    "disk over its limit": (lambda site, plan: site.cluster.overfill(site.pod(plan)), Cause.RANK_KILLED, "tmp_size"),
    "out of memory": (lambda site, plan: site.cluster.oom(site.pod(plan)), Cause.OOM, "resources.memory"),
    "node removed": (lose, Cause.NODE_LOST, "node"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_one_pod_ends_the_attempt_with_the_faults_cause(site: Site, fault: str) -> None:
    inflict, cause, words = FAULTS[fault]
    plan = site.submit()
    nodes = set(site.cluster.nodes)
    inflict(site, plan)
    state = reach(site.launcher, plan.ref, lambda state: not state.alive, "the attempt to be over")
    for name in nodes - set(site.cluster.nodes):
        site.cluster.return_node(name)
    (end,) = [end for end in state.ends if end.node == 1]
    assert end.cause is cause and words in end.message, state.ends
    assert {end.cause for end in state.ends if end.node == 0} <= {Cause.SIGTERM}, "the other pod was only stopped"
    assert len(site.cluster.pods(plan.ref.name)) <= 2, "nothing is made anew within the attempt"
    wait_for(lambda: site.launcher.kill(plan.ref) == [], "it to be proved dead", 30)


def test_missing_image_ends_the_attempt_with_an_error_naming_the_image(site: Site) -> None:
    site.cluster.kubelet.images.missing.add("absent:1")
    plan = site.submit(running=False, image="absent:1")
    state = reach(site.launcher, plan.ref, lambda state: not state.alive, "the attempt to be given up")
    assert {end.cause for end in state.ends} == {Cause.LAUNCHER_ERROR}
    assert "absent:1" in state.ends[0].message and "image_pull_secrets" in state.ends[0].message
    wait_for(lambda: site.launcher.kill(plan.ref) == [], "it to be proved dead", 30)


def test_unschedulable_pod_waits_until_resources_are_free(site: Site) -> None:
    for node in site.cluster.nodes.values():
        node.gpus = 0
    plan = site.submit(running=False, resources={"gpu": "nvidia.com/gpu"})
    waits = reach(site.launcher, plan.ref, lambda s: "Insufficient" in (s.waiting or ""), "the scheduler's words")
    assert waits.alive and waits.ends == ()
    for node in site.cluster.nodes.values():
        node.gpus = 8
    reach(site.launcher, plan.ref, lambda state: state.alive and state.waiting is None, "the pods to run")
    wait_for(lambda: site.launcher.kill(plan.ref) == [], "it to be proved dead", 30)


def test_exhausted_quota_is_shown_as_the_waiting_reason(site: Site) -> None:
    site.cluster.jobs.quota = len(site.cluster.pods())
    try:
        plan = site.submit(running=False)
        reach(site.launcher, plan.ref, lambda s: s.alive and "exceeded quota" in (s.waiting or ""), "the quota's words")
    finally:
        site.cluster.jobs.quota = None
    reach(site.launcher, plan.ref, lambda state: state.alive and state.waiting is None, "the pods to run")
    wait_for(lambda: site.launcher.kill(plan.ref) == [], "it to be proved dead", 30)
