"""The Kubernetes launcher when what it is told comes late, or is about a Job that has ended.

The server is a model behind real HTTP (``tests/support/kube``). A watch that lags behind another one is made by keeping its
events back: on a live cluster it comes about when a proxy cuts one of the connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_service.launchers.kubernetes.watch_cache import Cache
from tests.integration.service.launchers.test_kubernetes_watches import HELD, Site, ended, gone, site
from tests.support.kube.store import JOBS
from tests.support.server import wait_for

__all__ = ["site"]


@contextmanager
def jobs_unwatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What happens to Jobs is not told meanwhile, while all other watches go on."""
    apply = Cache.apply

    def without_jobs(self: Cache, kind: str, object_: Any, namespace: str, *, deleted: bool = False) -> None:
        if kind != "jobs":
            apply(self, kind, object_, namespace, deleted=deleted)

    with monkeypatch.context() as late:
        late.setattr(Cache, "apply", without_jobs)
        yield


def test_job_just_admitted_by_kueue_is_not_taken_for_a_suspended_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing orders two watches: that of the pods may tell of a pod before that of the Jobs tells of the start."""
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).alive
    with jobs_unwatched(monkeypatch):
        site.cluster.admit(plan.ref.name)
        wait_for(lambda: site.launcher.poll(plan.ref).nodes[0].note, "the pods' watch to tell of the pod", 30)
        state = site.launcher.poll(plan.ref)
        assert state.alive and state.ends == ()
    (job,) = site.cluster.store.select(JOBS)
    assert "deletionTimestamp" not in job["metadata"] and ("delete", "jobs") not in site.asked()
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)


def test_job_suspended_by_kueue_ends_with_cause_higher_priority(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    site.cluster.admit(plan.ref.name)
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)
    wait_for(lambda: site.launcher.poll(plan.ref).waiting is None, "that to be told", 30)
    with jobs_unwatched(monkeypatch):
        site.cluster.store.update(JOBS, "default", plan.ref.name, lambda job: job["spec"].update(suspend=True))
        state = ended(site, plan.ref)
    assert state.ends[0].cause is Cause.HIGHER_PRIORITY, state.ends


def test_sweep_does_not_delete_ended_kubernetes_jobs(site: Site) -> None:
    plan = site.plan()
    site.launcher.submit(plan)
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)
    site.cluster.oom(site.cluster.pods(plan.ref.name)[0])
    assert [end.cause for end in ended(site, plan.ref).ends] == [Cause.OOM]
    gone(site, plan.ref)
    assert site.launcher.sweep(lambda names: []) == []
    (job,) = site.cluster.store.select(JOBS)
    assert "deletionTimestamp" not in job["metadata"] and ("delete", "jobs") not in site.asked()
