"""Attempts as Jobs of a Kubernetes cluster: one Job per attempt, one pod per node. A poll reads mostly what watches have
received, and the files that the agents write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers import plan as planning
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineUnreachable, LaunchError, LaunchPlan
from ratchet_service.launchers.kubernetes import manifests, spec_checks
from ratchet_service.launchers.kubernetes.client import Api, Refusal
from ratchet_service.launchers.kubernetes.create import (
    chown_job_files,
    create_objects,
    delete_object,
    delete_secret_and_service,
    find_job,
)
from ratchet_service.launchers.kubernetes.delete import AttemptKiller, delete_job, is_marked_deleted, mark_deleted
from ratchet_service.launchers.kubernetes.job_status import ObservedState, View, evaluate
from ratchet_service.launchers.kubernetes.pod_patch import AGENT
from ratchet_service.launchers.kubernetes.pod_status import Patience, Pod
from ratchet_service.launchers.kubernetes.settings import Site, parse_settings
from ratchet_service.launchers.kubernetes.volumes import code_dir
from ratchet_service.launchers.kubernetes.watch_cache import Cache

_LOG_NODES: Final = 8
"""The most nodes whose logs are requested."""
_LOG_LINES: Final = 200


def make(home: HomePaths, settings: Mapping[str, Any]) -> KubernetesLauncher:
    """Return the Kubernetes launcher; contacts no cluster. Raises ``ValueError`` as ``parse_settings`` does."""
    return KubernetesLauncher(parse_settings(home, settings))


class KubernetesLauncher:
    """Runs attempts as Jobs of a Kubernetes cluster. ``environ``: where secrets' values are read from; None: this process's
    environment."""

    kind = "kubernetes"
    slots = False
    same_files = False
    excludes_nodes = True

    def __init__(self, site: Site, environ: Mapping[str, str] | None = None) -> None:
        settings = site.settings
        self.max_nodes = settings.max_nodes
        self._site = site
        self._environ = dict(os.environ if environ is None else environ)
        self._api = Api(settings)
        self._killer = AttemptKiller(self._api, site)
        self._patience = Patience(settings.fault_patience, settings.start_patience, settings.result_patience)
        self._lock = threading.Lock()
        self._watch_cache: Cache | None = None

    def close(self) -> None:
        """Stop the watches."""
        with self._lock:
            if self._watch_cache is not None:
                self._watch_cache.close()

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return warnings and problems of the spec (``spec_checks.check``)."""
        return spec_checks.check(self._site, spec)

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """Return the plan with the manifests of the Job and, for several nodes, of its Service, without secret values."""
        launch = launch.model_copy(update={"service_url": self._site.settings.url, "code_dir": code_dir(launch)})
        paths = AttemptPaths(Path(launch.attempt_dir))
        argv = tuple(manifests.agent_command(launch))
        asked = [manifests.job_manifest(self._site, launch), manifests.service_manifest(self._site, launch)]
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.attempt, paths, launch.spec.world.nodes),
            launch=launch,
            argv=argv,
            secrets=planning.secret_sources(launch.spec),
            ranks=planning.rank_commands(launch, argv[0]),
            request={"manifests": [manifest for manifest in asked if manifest is not None]},
        )

    def submit(self, plan: LaunchPlan) -> None:
        """Write ``launch.json``, and create the attempt's objects in the cluster. Between the two, a service that runs as root
        gives the job's files to the pods' user. Raises ``LaunchError``, ``EngineFull`` and ``EngineUnreachable``."""
        values = planning.secret_values(self._environ, plan.secrets)
        try:
            attempt_files.write_launch(plan.ref.paths, plan.launch)
            chown_job_files(self._site, plan.launch)
        except OSError as error:
            raise LaunchError(f"the attempt's directory cannot be prepared: {error}") from error
        cache = self._started_cache()
        cache.wait_ready()  # a server that has just started refuses requests, including watches, that it soon allows
        try:
            job = create_objects(self._api, self._site, plan.launch, values)
        except LaunchError:
            with suppress(EngineUnreachable):
                delete_secret_and_service(self._api, self._site, plan.ref.name)
            raise
        cache.add_job(job, job["metadata"]["namespace"])

    def poll(self, ref: AttemptRef) -> AttemptState:
        """Return the attempt's state. If the Job is suspended although it has pods or an agent has started, delete the Job.
        Raises ``EngineUnreachable``."""
        observed = self._observe(ref)
        view = self._evaluate(ref, observed)
        # Two watches are not ordered: the pods' may be ahead, and a change of the Job may not have been received yet.
        if (view.revoked and not observed.is_deleting) or (view.pod_deleted_by_hand and not view.alive):
            observed = self._refresh_job(ref, observed)
            view = self._evaluate(ref, observed)
        if view.revoked and not observed.is_deleting:
            delete_job(
                self._api, self._site, ref.name
            )  # else it could be resumed, and would start again as the same attempt
        for node in range(ref.nodes):
            if not ref.paths.node(node).agent_file.exists():
                _list_node_files(ref, node)
        nodes = attempt_files.node_states(ref, gone=lambda node: node in view.gone_nodes, notes=view.notes)
        all_started = (
            all(node.seen for node in nodes) and not view.revoked
        )  # the agents' files may be newer than the watches' state
        return AttemptState(view.alive, nodes, None if all_started else view.waiting, view.ends)

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Delete the Job: its pods get SIGTERM and their own grace period; ``grace`` is not used. Raises
        ``EngineUnreachable``."""
        mark_deleted(ref)
        delete_job(self._api, self._site, ref.name)

    def kill(self, ref: AttemptRef) -> list[str]:
        """Do one step of killing the attempt, and return names of what may still be alive. Raises ``EngineUnreachable``."""
        left = self._killer.kill(ref, self._observe(ref))
        if not left:
            delete_secret_and_service(self._api, self._site, ref.name)
        return left

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """Return the ends of the logs of the first ``_LOG_NODES`` pods, at most ``limit`` characters altogether. Raises
        ``EngineUnreachable``."""
        pods = sorted(self._observe(ref).pods, key=lambda pod: pod.node)[:_LOG_NODES]
        parts = []
        for pod in pods:
            text = self._pod_log(pod).strip()[-(limit // len(pods)) :]
            if text:
                parts.append(f"node {pod.node}: {text}" if ref.nodes > 1 else text)
        return "\n".join(parts)[-limit:]

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        """Find live attempts of this service in the cluster that ``known`` does not return, delete their objects, and return
        their names. Raises ``EngineUnreachable``."""
        cache = self._started_cache()
        cache.wait_ready()
        found = cache.live_attempts()
        orphans = sorted(set(found) - set(known(found))) if found else []
        for name in orphans:
            delete_job(self._api, self._site, name)
            delete_secret_and_service(self._api, self._site, name)
            for pod in cache.observe(name).pods:
                if not pod.has_ended:
                    delete_object(self._api, pod.path)
        return orphans

    def _started_cache(self) -> Cache:
        """Return the cache of the cluster's state; the first call starts its watches."""
        with self._lock:
            if self._watch_cache is None:
                chosen = manifests.label_selector(self._site.instance)
                self._watch_cache = Cache(self._api, self._site.namespaces, chosen)
                self._watch_cache.start()
            return self._watch_cache

    def _observe(self, ref: AttemptRef) -> ObservedState:
        """Return what the watches have received of the attempt. Raises ``EngineUnreachable`` if they are not ready."""
        cache = self._started_cache()
        cache.wait_ready()
        observed = cache.observe(ref.name)
        return replace(observed, deleted_by_service=observed.is_deleting and is_marked_deleted(ref))

    def _refresh_job(self, ref: AttemptRef, observed: ObservedState) -> ObservedState:
        """Return the attempt's observed state with the Job as the server has it now. ``observed`` contains the Job. Raises
        ``EngineUnreachable``."""
        assert observed.job is not None
        job = find_job(self._api, observed.job["metadata"]["namespace"], ref.name)
        if job is not None:
            self._started_cache().refresh(job, job["metadata"]["namespace"])
        return (
            self._observe(ref)
            if job is not None
            else replace(observed, deleted=True, deleted_by_service=is_marked_deleted(ref))
        )

    def _evaluate(self, ref: AttemptRef, observed: ObservedState) -> View:
        """Return what follows from the observed state now."""
        now = time.monotonic()
        return evaluate(
            observed, ref.nodes, lambda: _has_started(ref), lambda node: _has_result(ref, node), now, self._patience
        )

    def _pod_log(self, pod: Pod) -> str:
        """Return the end of the agent's log, as far as the server or the pod's status has it. Raises ``EngineUnreachable``."""
        if not pod.deleted and pod.status.get("state", {}).keys() & {"running", "terminated"}:
            with suppress(Refusal):
                return self._api.get_text(f"{pod.path}/log", container=AGENT, tailLines=_LOG_LINES)
        return str((pod.terminated or {}).get("message") or "")


def _has_started(ref: AttemptRef) -> bool:
    """True if any agent of the attempt has started."""
    return any(ref.paths.node(node).agent_file.exists() for node in range(ref.nodes))


def _has_result(ref: AttemptRef, node: int) -> bool:
    """True if the node's agent has left its result."""
    return ref.paths.node(node).result_file in _list_node_files(ref, node)


def _list_node_files(ref: AttemptRef, node: int) -> list[Path]:
    """Return the entries of a node's directory; empty if it cannot be read. This refreshes a network file system's cache."""
    with suppress(OSError):
        return list(ref.paths.node(node).root.iterdir())
    return []
