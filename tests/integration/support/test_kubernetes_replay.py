"""The modelled cluster against recordings of a real one, and the launcher against both.

A live cluster cannot run here. What can be shown is that the model answers recorded calls as the real server and Job controller
did, and that the launcher reads their recorded histories rightly. ``pytest -m cluster`` runs the launchers' suite on a real one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from tests.support.kube.cluster import Cluster
from tests.support.kube.jobs import ENDED
from tests.support.kube.recorded_histories import SCENARIOS, Call, Seen, history, keys, object_states, self_ended_pods
from tests.support.kube.store import JOBS, PODS, Object
from tests.support.server import wait_for

DEADLINE = 60.0
IMAGE = "local/worker:dev"  # the recorded pods'
SLEEP = """#!/bin/sh
until [ -e "$0.$FAKE_POD_UID" ]; do /bin/sleep 0.1; done
"""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every scenario's calls, made at their times, all at once."""
    image = tmp_path_factory.mktemp("image")
    (image / "sleep").write_text(SLEEP)
    (image / "sleep").chmod(0o755)
    with Cluster(tmp_path_factory.mktemp("cluster"), pace=1.0) as cluster:
        cluster.kubelet.images.first[IMAGE] = image
        with ThreadPoolExecutor(len(SCENARIOS)) as pool:
            list(pool.map(partial(_replay, cluster, image), SCENARIOS))
        yield cluster


def _replay(cluster: Cluster, image: Path, scenario: str) -> None:
    """Calls are made, and pods let out of their ``sleep``, in the order of the recording and not before its times: were they to
    sleep so many seconds, a busy machine would come too late with what is to happen to them meanwhile."""
    entries = history(scenario)
    ends = self_ended_pods(entries)
    first, *later = (i for i, entry in enumerate(entries) if isinstance(entry, Call) or i in ends)
    with config.new_client_from_config(str(cluster.kubeconfig)) as api:
        if "sleep" not in json.dumps(entries[first].body):  # its pods end at once
            cluster.jobs.hold(_name(scenario))
        _call(cluster, api, scenario, entries[first])
        began = time.monotonic()
        for i in later:
            time.sleep(max(0.0, began + entries[i].at - time.monotonic()))
            before = object_states([e for e in entries[:i] if isinstance(e, Seen)])
            if i in ends:
                _end(cluster, image, scenario, ends[i], before)
            else:
                job = {"job": before["job"]}
                wait_for(
                    lambda b=job: _reached(cluster, scenario, b), f"{scenario} to be where the call was made", DEADLINE
                )
                _call(cluster, api, scenario, entries[i])


def _end(cluster: Cluster, image: Path, scenario: str, ends: list[str], before: dict[str, list[Any]]) -> None:
    """These pods end, and the controller finds all of them ended when it looks next, as it did."""
    name = _name(scenario)
    there = {key: story for key, story in before.items() if key != "job"}
    sleeps = "sleep" in json.dumps(cluster.store.get(JOBS, "default", name)["spec"])
    if sleeps:
        wait_for(
            lambda: _reached(cluster, scenario, there), f"the pods of {scenario} to be where {ends} ended", DEADLINE
        )
    cluster.jobs.hold(name)
    for pod, key in keys(_seen(cluster, name)).items():
        if key in ends:
            (image / f"sleep.{cluster.store.get(PODS, 'default', pod)['metadata']['uid']}").touch()
    wait_for(lambda: _ended(cluster, name) >= set(ends), f"{ends} of {scenario} to end", DEADLINE)
    cluster.jobs.let_go(name)


def _ended(cluster: Cluster, name: str) -> set[str]:
    seen = _seen(cluster, name)
    names = keys(seen)
    return {
        names[e.object["metadata"]["name"]] for e in seen if e.kind == "pod" and e.object["status"]["phase"] in ENDED
    }


def _name(scenario: str) -> str:
    return f"g-{scenario.replace('_', '-')}"


def _reached(cluster: Cluster, scenario: str, recorded: dict[str, list[Any]]) -> bool:
    modelled = object_states(_seen(cluster, _name(scenario)))
    return all(modelled.get(key, [None])[-1] == story[-1] for key, story in recorded.items())


def _call(cluster: Cluster, api: client.ApiClient, scenario: str, call: Call | Seen) -> None:
    assert isinstance(call, Call)
    name = _name(scenario)
    if call.path.endswith("/eviction"):
        index = int(call.body["metadata"]["name"].split("-")[-2])
        pod = cluster.pods(name)[index]["metadata"]["name"]
        client.CoreV1Api(api).create_namespaced_pod_eviction(pod, "default", call.body | {"metadata": {"name": pod}})
    elif call.method == "POST":
        client.BatchV1Api(api).create_namespaced_job("default", call.body)
    elif call.method == "PATCH":
        client.BatchV1Api(api).patch_namespaced_job(name, "default", call.body)
    else:
        client.BatchV1Api(api).delete_namespaced_job(name, "default")


def _seen(cluster: Cluster, name: str) -> list[Seen]:
    found = []
    for change in cluster.store.history:
        labels, kind = change.object["metadata"].get("labels", {}), change.resource.kind.lower()
        if labels.get("job") == name and kind in ("job", "pod"):
            found.append(Seen(0.0, kind, change.type, change.object))
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fake_cluster_passes_through_recorded_states(replayed: Cluster, scenario: str) -> None:
    recorded = object_states([entry for entry in history(scenario) if isinstance(entry, Seen)])
    try:
        wait_for(lambda: _reached(replayed, scenario, recorded), f"{scenario} to end as recorded", DEADLINE)
    finally:
        assert object_states(_seen(replayed, _name(scenario))) == recorded


def _nameless(made: Object, kind: str) -> Object:
    """What of a new object does not depend on chance or time."""
    text = json.dumps(made)
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UID", text)
    text = re.sub(r"(?<=-\d-)[a-z0-9]{5}(?=\")", "*", text)
    left: Object = json.loads(text)
    for key in ("resourceVersion", "creationTimestamp", "managedFields"):
        left["metadata"].pop(key, None)
    return left


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fake_cluster_fills_in_recorded_defaults_and_labels(replayed: Cluster, scenario: str) -> None:
    """Defaults, selector and labels of Job and pods, all of their specs."""
    entries = [entry for entry in history(scenario) if isinstance(entry, Seen)]
    name = _name(scenario)
    for kind in ("job", "pod"):
        theirs = next(e.object for e in entries if e.kind == kind and e.type == "ADDED")
        ours = next(e.object for e in _seen(replayed, name) if e.kind == kind and e.type == "ADDED")
        assert _nameless(ours, kind) == _nameless(theirs, kind)
