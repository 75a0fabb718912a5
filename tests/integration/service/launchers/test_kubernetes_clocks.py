"""The cluster's clock and the service's machine's differ by hours, or one of them is set: no healthy pod is taken for a lost one,
and a lost one is still found. The server is a model behind real HTTP (``tests/support/kube``).
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_service.launchers.base import AttemptRef
from tests.integration.service.launchers.test_kubernetes_watches import Site, gone, site
from tests.support.kube import store
from tests.support.server import wait_for

__all__ = ["site"]


def cluster_is_ahead(monkeypatch: pytest.MonkeyPatch, by: timedelta) -> None:
    class Other(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + by

    monkeypatch.setattr(store, "datetime", Other)


def leaving(site: Site, ref: AttemptRef) -> bool:
    """The launcher has heard that the pods are being deleted."""
    pods = site.launcher._observe(ref).pods
    return bool(pods) and all("deletionTimestamp" in pod.object["metadata"] for pod in pods)


def runs(argument: str) -> bool:
    """Has a process of this machine such an argument?"""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


def test_pod_within_its_grace_is_not_lost_when_the_cluster_clock_is_behind(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_is_ahead(monkeypatch, timedelta(hours=-2))
    program = tmp_path / "saving" / "python"
    program.parent.mkdir()
    seconds = f"1000.{os.getpid()}"  # by which this pod's sleep is found
    program.write_text(f"#!/bin/sh\ntrap '' TERM\nsleep {seconds} &\nwait\n")
    program.chmod(0o755)
    site.cluster.kubelet.images.first["saves"] = program.parent
    site.launcher = site.launcher_of(image="saves", lost_after=0.01)
    plan = site.plan()
    site.launcher.submit(plan)
    wait_for(lambda: site.running(plan.ref) and runs(seconds), "the pod to run, and not to hear a SIGTERM", 30)
    site.launcher.stop(plan.ref, 60)
    wait_for(lambda: leaving(site, plan.ref), "the deletion to be seen", 30)
    state = site.launcher.poll(plan.ref)
    assert state.alive and state.ends == () and state.lost == ()
    said: list[str] = []

    def proved() -> bool:
        left = site.launcher.kill(plan.ref)
        said.extend(left)
        return not left

    wait_for(proved, "the attempt to be proved dead", 30)
    assert not [text for text in said if "does not answer" in text], "it was given up while its machine was well"


def test_image_pull_keeps_its_patience_when_the_cluster_clock_is_behind(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_is_ahead(monkeypatch, timedelta(hours=-2))
    site.cluster.kubelet.images.missing.add("waits")
    plan = site.plan()
    site.launcher.submit(plan)
    wait_for(lambda: "cannot be pulled" in (site.launcher.poll(plan.ref).waiting or ""), "the kubelet's word", 30)
    assert site.launcher.poll(plan.ref).ends == ()
    site.cluster.kubelet.images.missing.clear()
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)
    gone(site, plan.ref)


def test_lost_machine_is_detected_when_the_cluster_clock_is_ahead(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost machine is modelled by hand."""
    cluster_is_ahead(monkeypatch, timedelta(hours=2))
    site.launcher = site.launcher_of(lost_after=0.5)
    plan = site.plan(policy={"stop_grace": 1})
    site.launcher.submit(plan)
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)
    (pod,) = site.cluster.pods(plan.ref.name)
    site.cluster.lose_node(pod["spec"]["nodeName"])
    wait_for(lambda: site.launcher.kill(plan.ref) == [], "the machine to be given up", 60)
    assert {end.cause for end in site.launcher.poll(plan.ref).ends} <= {Cause.NODE_LOST}
    assert site.cluster.pods(plan.ref.name) == []
