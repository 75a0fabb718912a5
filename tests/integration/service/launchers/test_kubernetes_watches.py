"""The launcher's calls on an API server: what it asks for, how often, and what it makes of answers that fail.

The server is a model behind real HTTP (``tests/support/kube``). A watch that expires (410 Gone), a machine that is lost and a
server that does not answer are modelled by hand: nobody recorded them, and what a live cluster does then is not proved here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.spec.job import Resolved
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineFull,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.kubernetes.client import Api, Refusal
from ratchet_service.launchers.kubernetes.create import refusal_message
from ratchet_service.launchers.kubernetes.launcher import KubernetesLauncher
from ratchet_service.launchers.kubernetes.settings import parse_settings
from ratchet_service.launchers.kubernetes.watch_cache import Cache
from ratchet_service.launchers.launch_file import build_launch_file
from tests.support.kube import operations
from tests.support.kube.cluster import Cluster
from tests.support.kube.store import JOBS, PODS, SECRETS, SERVICES
from tests.support.kube_jobs import JOB_ID, spec_of
from tests.support.server import wait_for

HELD = {"launcher": {"queue": "vision"}}
"""A Job that nobody starts: enough where no pod is needed."""


@dataclass
class Site:
    """A cluster, and a launcher whose pods run ``python``: here a shell that waits to be told to end."""

    cluster: Cluster
    home: HomePaths
    launcher: KubernetesLauncher

    def plan(self, attempt: int = 1, **spec: Any) -> LaunchPlan:
        made = spec_of(**spec)
        resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python")
        return self.launcher.plan(
            build_launch_file(self.home, JOB_ID, attempt, made, resolved, (), token="t", desired=Desired.RUN)
        )

    def launcher_of(self, environ: dict[str, str] | None = None, **settings: Any) -> KubernetesLauncher:
        given = {
            "claim": "home", "url": "http://127.0.0.1:9", "image": "waits", "run_as_user": 10001,
            "kubeconfig": str(self.cluster.kubeconfig), "result_patience": 0,
        }  # fmt: skip
        return KubernetesLauncher(parse_settings(self.home, given | settings), environ or {})

    def running(self, ref: AttemptRef) -> bool:
        pods = self.cluster.pods(ref.name)
        return len(pods) == ref.nodes and all(p["status"]["phase"] == "Running" for p in pods)

    def asked(self) -> list[tuple[str, str]]:
        return [(request.verb, request.resource) for request in self.cluster.api.requests]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    tmp_path.chmod(0o755)
    home = HomePaths(tmp_path / "home")
    home.home.mkdir()
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho waiting\ntrap 'exit 143' TERM\nsleep 1000 &\nwait\n")
    program.chmod(0o755)
    with Cluster(tmp_path, claims={"home": home.home}) as cluster:
        cluster.kubelet.images.first["waits"] = program.parent
        made = Site(cluster, home, None)  # type: ignore[arg-type]
        made.launcher = made.launcher_of()
        yield made
        made.launcher.close()


def gone(site: Site, ref: AttemptRef) -> None:
    wait_for(lambda: not site.launcher.kill(ref), "the attempt to be proved dead", 30)


def settled(site: Site, ref: AttemptRef) -> bool:
    """The watches are there, and the Job controller has had its look at the new Job."""
    job = site.cluster.store.get(JOBS, "default", ref.name)
    return len(site.cluster.api.watches) == 3 and bool(job["status"].get("conditions"))


def ended(site: Site, ref: AttemptRef) -> AttemptState:
    return wait_for(lambda: s if not (s := site.launcher.poll(ref)).alive else None, "the end", 30)


def test_polls_make_no_api_requests(site: Site) -> None:
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    assert "queue vision" in (site.launcher.poll(plan.ref).waiting or "")
    needed = [("create", "jobs"), *((verb, kind) for verb in ("list", "watch") for kind in ("events", "jobs", "pods"))]
    wait_for(lambda: sorted(site.asked()) == sorted(needed), "one list and one watch of each kind", 30)
    before = site.asked()
    site.cluster.admit(plan.ref.name)
    wait_for(lambda: site.launcher.poll(plan.ref).waiting is None, "the pod to run", 30)
    for _ in range(200):
        site.launcher.poll(plan.ref)
    after = site.asked()
    assert after[: len(before)] == before
    assert after[len(before) :] in (
        [],
        [("get", "jobs")],
    )  # a single look at the Job, where the pods' watch was ahead of its own


def test_cache_ignores_watch_events_older_than_a_refreshed_object(site: Site) -> None:
    cache = Cache(Api(site.launcher_of()._site.settings), ("default",), "")

    def job(version: int, *, suspend: bool, uid: str = "a") -> dict[str, Any]:
        metadata = {"name": "job-1-1", "uid": uid, "resourceVersion": str(version)}
        return {"metadata": metadata, "spec": {"suspend": suspend}}

    def suspended() -> bool:
        return bool((cache.observe("job-1-1").job or {})["spec"]["suspend"])

    cache.apply("jobs", job(3, suspend=True), "default")
    cache.refresh(job(9, suspend=False), "default")
    cache.apply("jobs", job(5, suspend=True), "default")
    assert not suspended()
    cache.apply("jobs", job(11, suspend=True), "default")
    assert suspended()
    cache.apply("jobs", job(2, suspend=False, uid="b"), "default")  # another Job of that name
    assert not suspended()
    cache.apply("jobs", job(2, suspend=False, uid="b"), "default", deleted=True)
    assert cache.observe("job-1-1").deleted


def test_a_second_submission_changes_nothing(site: Site) -> None:
    plan = site.plan(world={"nodes": 2}, **HELD)
    site.launcher.submit(plan)
    (uid,) = {job["metadata"]["uid"] for job in site.cluster.store.select(JOBS)}
    other = site.launcher_of()
    other.submit(plan)
    assert {job["metadata"]["uid"] for job in site.cluster.store.select(JOBS)} == {uid}
    assert len(site.cluster.store.select(SERVICES)) == 1
    assert other.poll(plan.ref).alive
    other.close()


def test_job_may_use_another_namespace_allowed_by_the_site(site: Site) -> None:
    site.launcher = site.launcher_of(namespaces=["other"])
    plan = site.plan(launcher={"namespace": "other", "queue": "vision"})
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).waiting is not None
    assert [job["metadata"]["namespace"] for job in site.cluster.store.select(JOBS)] == ["other"]
    gone(site, plan.ref)
    assert site.cluster.store.select(JOBS) == []


def test_submit_refuses_a_foreign_kubernetes_job_of_the_same_name(site: Site) -> None:
    plan = site.plan(**HELD)
    theirs = plan.request["manifests"][0]
    theirs["metadata"]["labels"]["ratchet.dev/instance"] = "00000000"
    operations.create(site.cluster.store, JOBS, "default", theirs)
    with pytest.raises(LaunchError, match="does not belong to this service"):
        site.launcher.submit(plan)
    assert len(site.cluster.store.select(JOBS)) == 1 and not site.launcher.poll(plan.ref).alive


def test_kubernetes_secret_is_deleted_with_the_attempt_and_never_read(site: Site) -> None:
    site.launcher = site.launcher_of({"KEY": "hidden"})
    plan = site.plan(secrets={"API_KEY": {"from_env": "KEY"}}, **HELD)
    site.launcher.submit(plan)
    (secret,) = site.cluster.store.select(SECRETS)
    assert secret["stringData"] == {"API_KEY": "hidden"} and secret["metadata"]["name"] == plan.ref.name
    assert "hidden" not in plan.ref.paths.launch_file.read_text()
    gone(site, plan.ref)
    assert site.cluster.store.select(SECRETS) == [] == site.cluster.store.select(JOBS)
    assert {verb for verb, kind in site.asked() if kind == "secrets"} == {"create", "patch", "delete"}


def test_job_is_not_created_while_an_old_secret_is_being_deleted(site: Site) -> None:
    """One of an interrupted launch, perhaps with other values; a finalizer keeps it for some time."""
    site.launcher = site.launcher_of({"KEY": "new"})
    plan = site.plan(secrets={"API_KEY": {"from_env": "KEY"}}, **HELD)
    metadata = {"name": plan.ref.name, "finalizers": ["example.com/backup"]}
    site.cluster.store.create(SECRETS, "default", {"metadata": metadata, "stringData": {"API_KEY": "old"}})
    with pytest.raises(EngineUnreachable, match=f"the old Secret {plan.ref.name} in default is still being deleted"):
        site.launcher.submit(plan)
    assert site.cluster.store.select(JOBS) == []
    site.cluster.store.update(SECRETS, "default", plan.ref.name, lambda secret: secret["metadata"].pop("finalizers"))
    site.launcher.submit(plan)
    (secret,) = site.cluster.store.select(SECRETS)
    assert secret["stringData"] == {"API_KEY": "new"} and site.launcher.poll(plan.ref).alive
    gone(site, plan.ref)


def test_secret_and_service_are_garbage_collected_with_the_kubernetes_job(site: Site) -> None:
    site.launcher = site.launcher_of({"KEY": "hidden"})
    plan = site.plan(secrets={"API_KEY": {"from_env": "KEY"}}, world={"nodes": 2}, **HELD)
    site.launcher.submit(plan)
    site.launcher.close()
    assert len(site.cluster.store.select(SECRETS)) == len(site.cluster.store.select(SERVICES)) == 1
    operations.delete(site.cluster.store, JOBS, "default", plan.ref.name, {})
    wait_for(lambda: site.cluster.store.select(SECRETS) == [], "the Secret to be collected", 30)
    wait_for(lambda: site.cluster.store.select(SERVICES) == [], "the Service to be collected", 30)


def test_attempt_starts_without_the_right_to_patch(site: Site) -> None:
    """A Role of an older version: what is beside the Job is taken away at the attempt's end alone."""
    site.cluster.api.forbidden = lambda verb, on: f"cannot {verb} resource" if verb == "patch" else None
    plan = site.plan(world={"nodes": 2}, **HELD)
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).alive
    gone(site, plan.ref)
    assert site.cluster.store.select(SERVICES) == [] == site.cluster.store.select(JOBS)


def test_refused_job_creation_raises_launch_error_and_leaves_no_secret(site: Site) -> None:
    site.launcher = site.launcher_of({"KEY": "hidden"})
    refusal = 'jobs.batch "x" is forbidden: User "a" cannot create resource "jobs"'
    site.cluster.api.forbidden = lambda verb, on: refusal if (verb, on.resource.plural) == ("create", "jobs") else None
    plan = site.plan(secrets={"API_KEY": {"from_env": "KEY"}})
    with pytest.raises(LaunchError, match=r"lacks a permission.*cannot create"):
        site.launcher.submit(plan)
    assert site.cluster.store.select(SECRETS) == []


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (422, "Invalid", "ValidatingAdmissionPolicy 'cost' with binding 'all' denied request: jobs need a label team"),
        (403, "Forbidden", 'jobs.batch "x" is forbidden: a policy of the namespace denies it'),
    ],
)
def test_refusal_message_quotes_only_the_denial(code: int, reason: str, message: str) -> None:
    body = json.dumps({"code": code, "reason": reason, "message": message}).encode()
    assert refusal_message(Refusal(code, body)) == f"Kubernetes refuses ({code} {reason}): {message}"


def test_submit_with_exhausted_quota_raises_engine_full_and_can_be_retried(site: Site) -> None:
    full: list[str] = ['jobs.batch "x" is forbidden: exceeded quota: jobs']
    site.cluster.api.forbidden = lambda verb, on: (
        full[0] if full and (verb, on.resource.plural) == ("create", "jobs") else None
    )
    plan = site.plan(**HELD)
    with pytest.raises(EngineFull, match="exceeded quota: jobs"):
        site.launcher.submit(plan)
    full.clear()
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).alive
    gone(site, plan.ref)


@pytest.mark.parametrize("kind", ["secrets", "services", "jobs"])
def test_submit_whose_answer_is_cut_raises_engine_unreachable_and_can_be_retried(site: Site, kind: str) -> None:
    site.launcher = site.launcher_of({"KEY": "hidden"})
    cut = [True]
    site.cluster.api.cut = lambda verb, on: bool(cut) and (verb, on.resource.plural) == ("create", kind)
    plan = site.plan(secrets={"API_KEY": {"from_env": "KEY"}}, world={"nodes": 2}, **HELD)
    with pytest.raises(EngineUnreachable, match="cut its response short"):
        site.launcher.submit(plan)
    cut.clear()
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).alive
    assert [len(site.cluster.store.select(each)) for each in (SECRETS, SERVICES, JOBS)] == [1, 1, 1]
    gone(site, plan.ref)


def test_kill_without_the_right_to_delete_raises_engine_unreachable(site: Site) -> None:
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    site.cluster.api.forbidden = lambda verb, on: "no right to delete" if verb == "delete" else None
    for _ in range(2):
        with pytest.raises(EngineUnreachable, match="no right to delete"):
            site.launcher.kill(plan.ref)
    site.cluster.api.forbidden = lambda verb, on: None
    gone(site, plan.ref)


def test_expired_watch_is_restarted_with_one_list(site: Site) -> None:
    """410 Gone, modelled by hand. What vanished meanwhile is missing from the list, and counts as deleted."""
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).alive
    wait_for(lambda: settled(site, plan.ref), "watches and controllers to have nothing to do", 30)
    lists = site.asked().count(("list", "jobs"))
    with site.cluster.store.changed:  # no watch hears of the deletion before it is told that it is too late
        operations.delete(site.cluster.store, JOBS, "default", plan.ref.name, {})
        site.cluster.api.expire()
    state = wait_for(
        lambda: s if not (s := site.launcher.poll(plan.ref)).alive else None, "the deletion to be seen", 30
    )
    assert [end.cause for end in state.ends] == [Cause.EVICTED]
    assert site.asked().count(("list", "jobs")) == lists + 1


def test_watch_without_chunked_encoding_is_read_incrementally(site: Site) -> None:
    site.cluster.api.chunked = False
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).waiting is not None
    site.cluster.admit(plan.ref.name)
    wait_for(lambda: site.launcher.poll(plan.ref).waiting is None, "the pod to be seen to run", 20)


def test_events_watch_retries_after_being_forbidden_at_server_start(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """As seen for some seconds after the start of a real API server."""
    refusing = [True]
    site.cluster.api.forbidden = lambda verb, on: (
        "RBAC: not yet" if refusing and on.resource.plural == "events" else None
    )
    site.cluster.jobs.quota = 0
    plan = site.plan()
    site.launcher.submit(plan)
    waiting = wait_for(
        lambda: w if "RBAC" in (w := site.launcher.poll(plan.ref).waiting or "") else None, "the refusal to be told", 30
    )
    assert waiting.startswith("1 of 1 pod not made yet; the reason is unknown, since warning events cannot be read")
    assert f"`kubectl --namespace default describe job {plan.ref.name}`" in waiting
    wait_for(lambda: site.asked().count(("list", "events")) > 2, "the events to be asked for again", 30)
    refusing.clear()
    wait_for(lambda: "exceeded quota" in (site.launcher.poll(plan.ref).waiting or ""), "the reason to be told", 30)
    assert sum("events cannot be watched" in record.getMessage() for record in caplog.records) == 1


def test_interrupted_watch_resumes_without_a_new_list(site: Site) -> None:
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).alive
    wait_for(lambda: settled(site, plan.ref), "watches and controllers to have nothing to do", 30)
    lists = [entry for entry in site.asked() if entry[0] == "list"]
    site.cluster.api.cut_watches()
    operations.delete(site.cluster.store, JOBS, "default", plan.ref.name, {})
    wait_for(lambda: not site.launcher.poll(plan.ref).alive, "the deletion to be seen", 30)
    assert [entry for entry in site.asked() if entry[0] == "list"] == lists


def test_unresponsive_api_server_raises_engine_unreachable_with_few_requests(site: Site) -> None:
    plan, later = site.plan(**HELD), site.plan(2, **HELD)
    site.launcher.submit(plan)
    assert site.launcher.poll(plan.ref).alive

    def silent() -> bool:
        try:
            site.launcher.poll(plan.ref)
        except EngineUnreachable:
            return True
        return False

    with site.cluster.api.unreachable():
        wait_for(silent, "the silence to be noticed", 30)
        for call in (site.launcher.kill, site.launcher.poll, lambda ref: site.launcher.logs(ref, 100)):
            with pytest.raises(EngineUnreachable):
                call(plan.ref)
        with pytest.raises(EngineUnreachable):
            site.launcher.submit(later)
    wait_for(lambda: not silent(), "the server to be found again", 30)
    assert site.launcher.poll(plan.ref).alive
    assert len([1 for verb, _ in site.asked() if verb == "watch"]) < 15
    site.launcher.submit(later)
    assert site.launcher.poll(later.ref).alive


def test_stop_gives_pods_their_grace_and_ends_with_cause_sigterm(site: Site) -> None:
    plan = site.plan()
    site.launcher.submit(plan)
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)
    wait_for(lambda: "waiting" in site.launcher.logs(plan.ref, 1000), "its output", 30)
    site.launcher.stop(plan.ref, 10)
    state = ended(site, plan.ref)
    assert [end.cause for end in state.ends] == [Cause.SIGTERM]  # of itself: nobody else deleted the Job
    gone(site, plan.ref)
    assert site.cluster.pods(plan.ref.name) == []


def test_kill_does_not_delete_a_kubernetes_job_that_ended_by_itself(site: Site) -> None:
    plan = site.plan()
    site.launcher.submit(plan)
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)
    site.cluster.oom(site.cluster.pods(plan.ref.name)[0])
    state = ended(site, plan.ref)
    assert [end.cause for end in state.ends] == [Cause.OOM], state.ends
    gone(site, plan.ref)
    assert [job["metadata"]["name"] for job in site.cluster.store.select(JOBS)] == [plan.ref.name]
    assert ("delete", "jobs") not in site.asked()


def test_pod_on_a_lost_machine_is_alive_until_counted_as_fenced(site: Site) -> None:
    """A lost machine is modelled by hand. With ``lost_after: null`` its pod is never given up."""
    site.launcher, patient = site.launcher_of(lost_after=1.0), site.launcher_of(lost_after=None)
    plan = site.plan(world={"nodes": 2})
    site.launcher.submit(plan)
    wait_for(lambda: site.running(plan.ref), "the pods to run", 30)
    lost = site.cluster.pods(plan.ref.name)[1]
    site.cluster.lose_node(lost["spec"]["nodeName"])
    state = wait_for(lambda: s if (s := site.launcher.poll(plan.ref)).ends else None, "the loss to be known", 30)
    assert [(end.cause, end.node) for end in state.ends] == [(Cause.NODE_LOST, 1)] and state.alive
    left: list[str] = []

    def given_up(launcher: KubernetesLauncher, words: str) -> bool:
        left[:] = launcher.kill(plan.ref)
        return any(words in name for name in left)

    try:
        wait_for(lambda: given_up(patient, "once it is certainly switched off"), "the advice to an administrator", 60)
        patient.kill(plan.ref)
        assert [pod["metadata"]["name"] for pod in site.cluster.pods()] == [lost["metadata"]["name"]]
    finally:
        patient.close()
    wait_for(lambda: given_up(site.launcher, "fenced"), "the machine to be given up", 60)
    assert any(lost["metadata"]["name"] in name for name in left)
    assert [pod["metadata"]["name"] for pod in site.cluster.pods()] == [lost["metadata"]["name"]]
    gone(site, plan.ref)
    assert site.cluster.store.select(PODS) == [] == site.cluster.store.select(JOBS)


def test_kubernetes_job_suspended_by_kueue_is_deleted_before_a_restart(site: Site) -> None:
    """Kueue is modelled by hand: it suspends a running Job, and would start it again."""
    plan = site.plan(**HELD)
    site.launcher.submit(plan)
    site.cluster.admit(plan.ref.name)
    wait_for(lambda: site.running(plan.ref), "the pod to run", 30)
    site.cluster.store.update(JOBS, "default", plan.ref.name, lambda job: job["spec"].update(suspend=True))
    state = ended(site, plan.ref)
    assert state.ends[0].cause is Cause.HIGHER_PRIORITY
    wait_for(lambda: site.cluster.store.select(JOBS) == [], "the Job to go, before anybody starts it again", 30)


def test_sweep_deletes_only_orphaned_jobs_of_the_own_instance(site: Site) -> None:
    mine, orphan = site.plan(1, **HELD), site.plan(2, **HELD)
    for plan in (mine, orphan):
        site.launcher.submit(plan)
    theirs = site.plan(3, **HELD).request["manifests"][0]
    theirs["metadata"]["labels"]["ratchet.dev/instance"] = "00000000"
    operations.create(site.cluster.store, JOBS, "default", theirs)
    asked: list[str] = []

    def known(names: Any) -> list[str]:
        asked.extend(names)
        return [mine.ref.name]

    wait_for(lambda: site.launcher.sweep(known) == [orphan.ref.name], "the orphan to be found", 30)
    assert set(asked) == {mine.ref.name, orphan.ref.name}
    left = {mine.ref.name, theirs["metadata"]["name"]}
    wait_for(
        lambda: {job["metadata"]["name"] for job in site.cluster.store.select(JOBS)} == left, "the orphan to go", 30
    )
    assert site.launcher.sweep(lambda names: [mine.ref.name]) == []
