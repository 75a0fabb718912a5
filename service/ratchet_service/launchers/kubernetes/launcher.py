"""Attempts as Jobs of a Kubernetes cluster: one Job per attempt, one pod per node.

A poll reads what watches have brought. Only what changes something is a request, and the proof that an attempt is dead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_service.launchers import files, planning
from ratchet_service.launchers.base import AttemptRef, AttemptState, EngineUnreachable, LaunchError, LaunchPlan
from ratchet_service.launchers.kubernetes import manifests, spec_checks
from ratchet_service.launchers.kubernetes.api import Api, Refusal
from ratchet_service.launchers.kubernetes.cache import Cache
from ratchet_service.launchers.kubernetes.creation import clear, create, delete, find_job, hand_over
from ratchet_service.launchers.kubernetes.killing import Killing, delete_job, mark, marked
from ratchet_service.launchers.kubernetes.mounts import code_dir
from ratchet_service.launchers.kubernetes.patch import AGENT
from ratchet_service.launchers.kubernetes.pods import Patience, Pod
from ratchet_service.launchers.kubernetes.settings import Site, parse
from ratchet_service.launchers.kubernetes.states import Seen, View, look

_LOG_NODES: Final = 8
"""Nodes whose logs are asked for."""
_LOG_LINES: Final = 200


def make(home: HomePaths, settings: Mapping[str, Any]) -> KubernetesLauncher:
    """The factory that the table names. Touches no cluster. Raises ``ValueError`` for settings."""
    return KubernetesLauncher(parse(home, settings))


class KubernetesLauncher:
    """See the module. ``environ``: where secrets' values are taken from."""

    kind = "kubernetes"
    slots = False
    same_files = False

    def __init__(self, site: Site, environ: Mapping[str, str] | None = None) -> None:
        settings = site.settings
        self.max_nodes = settings.max_nodes
        self._site = site
        self._environ = dict(os.environ if environ is None else environ)
        self._api = Api(settings)
        self._killing = Killing(self._api, site)
        self._patience = Patience(settings.fault_patience, settings.start_patience, settings.result_patience)
        self._lock = threading.Lock()
        self._watching: Cache | None = None

    def close(self) -> None:
        """End the watches."""
        with self._lock:
            if self._watching is not None:
                self._watching.close()

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        return spec_checks.check(self._site, spec)

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        launch = launch.model_copy(update={"service_url": self._site.settings.url, "code_dir": code_dir(launch)})
        paths = AttemptPaths(Path(launch.attempt_dir))
        argv = tuple(manifests.agent_command(launch))
        asked = [manifests.job(self._site, launch), manifests.service(self._site, launch)]
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.epoch, paths, launch.spec.world.nodes),
            launch=launch,
            argv=argv,
            secrets=planning.secret_sources(launch.spec),
            ranks=planning.rank_commands(launch, argv[0]),
            request={"manifests": [manifest for manifest in asked if manifest is not None]},
        )

    def submit(self, plan: LaunchPlan) -> None:
        values = planning.secret_values(self._environ, plan.secrets)
        try:
            files.write_launch(plan.ref.paths, plan.launch)
            hand_over(self._site, plan.launch)
        except OSError as error:
            raise LaunchError(f"the attempt's directory cannot be prepared: {error}") from error
        cache = self._cache()
        cache.ready()  # a server that has just started refuses what it will allow in a moment, watches too
        try:
            job = create(self._api, self._site, plan.launch, values)
        except LaunchError:
            with suppress(EngineUnreachable):
                clear(self._api, self._site, plan.ref.name)
            raise
        cache.add_job(job, job["metadata"]["namespace"])

    def poll(self, ref: AttemptRef) -> AttemptState:
        seen = self._seen(ref)
        view = self._view(ref, seen)
        # Nothing orders two watches: that of the pods may be ahead, and what was done to the Job may not have been told yet.
        if (view.revoked and not seen.leaving) or (view.by_hand and not view.alive):
            seen = self._asked(ref, seen)
            view = self._view(ref, seen)
        if view.revoked and not seen.leaving:
            delete_job(self._api, self._site, ref.name)  # else whoever suspended it starts it again, as the same epoch
        for node in range(ref.nodes):
            if not ref.paths.node(node).agent_file.exists():
                _listed(ref, node)
        nodes = files.node_states(ref, gone=lambda node: node in view.gone, notes=view.notes)
        begun = all(node.seen for node in nodes) and not view.revoked  # the agents' files may be ahead of the watches
        return AttemptState(view.alive, nodes, None if begun else view.waiting, view.ends)

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """The pods get SIGTERM and the time of their own grace, which was made for saving."""
        mark(ref)
        delete_job(self._api, self._site, ref.name)

    def kill(self, ref: AttemptRef) -> list[str]:
        left = self._killing.kill(ref, self._seen(ref))
        if not left:
            clear(self._api, self._site, ref.name)
        return left

    def logs(self, ref: AttemptRef, limit: int) -> str:
        pods = sorted(self._seen(ref).pods, key=lambda pod: pod.node)[:_LOG_NODES]
        parts = []
        for pod in pods:
            text = self._log(pod).strip()[-(limit // len(pods)) :]
            if text:
                parts.append(f"node {pod.node}: {text}" if ref.nodes > 1 else text)
        return "\n".join(parts)[-limit:]

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        cache = self._cache()
        cache.ready()
        found = cache.names()
        orphans = sorted(set(found) - set(known(found))) if found else []
        for name in orphans:
            delete_job(self._api, self._site, name)
            clear(self._api, self._site, name)
            for pod in cache.seen(name).pods:
                if not pod.over:
                    delete(self._api, pod.path)
        return orphans

    def _cache(self) -> Cache:
        with self._lock:
            if self._watching is None:
                chosen = manifests.selector(self._site.instance)
                self._watching = Cache(self._api, self._site.namespaces, chosen)
                self._watching.start()
            return self._watching

    def _seen(self, ref: AttemptRef) -> Seen:
        cache = self._cache()
        cache.ready()
        seen = cache.seen(ref.name)
        return replace(seen, ours=seen.leaving and marked(ref))

    def _asked(self, ref: AttemptRef, seen: Seen) -> Seen:
        """With the Job as the server has it now."""
        assert seen.job is not None
        job = find_job(self._api, seen.job["metadata"]["namespace"], ref.name)
        if job is not None:
            self._cache().refresh(job, job["metadata"]["namespace"])
        return self._seen(ref) if job is not None else replace(seen, deleted=True, ours=marked(ref))

    def _view(self, ref: AttemptRef, seen: Seen) -> View:
        now = time.monotonic()
        return look(seen, ref.nodes, lambda: _began(ref), lambda node: _has_result(ref, node), now, self._patience)

    def _log(self, pod: Pod) -> str:
        """Of the agent's container; where the log is gone, what the pod's status has kept of it."""
        if not pod.deleted and pod.status.get("state", {}).keys() & {"running", "terminated"}:
            with suppress(Refusal):
                return self._api.text(f"{pod.path}/log", container=AGENT, tailLines=_LOG_LINES)
        return str((pod.terminated or {}).get("message") or "")


def _began(ref: AttemptRef) -> bool:
    return any(ref.paths.node(node).agent_file.exists() for node in range(ref.nodes))


def _has_result(ref: AttemptRef, node: int) -> bool:
    return ref.paths.node(node).result_file in _listed(ref, node)


def _listed(ref: AttemptRef, node: int) -> list[Path]:
    """A node's files. Listing makes a network file system forget for how long it knew that one was not there."""
    with suppress(OSError):
        return list(ref.paths.node(node).root.iterdir())
    return []
