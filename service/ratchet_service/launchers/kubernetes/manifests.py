"""From a launch to what Kubernetes is asked for: a Job of one pod per node, a Service for their names, a Secret. Pure.

Restarts are Ratchet's: ``backoffLimit: 0``, and the failure policy *fails* the Job. With ``Ignore`` the controller would make a
pod anew within the same Job, which is the same epoch. The rules' order is that of their evaluation: an evicted pod mostly ends
with 143, and the Job's condition should tell of the eviction. Codes that are not reserved meet ``backoffLimit``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from ratchet_contract import environment as names
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.spec_engines import KubernetesLauncherSpec
from ratchet_service.launchers.base import attempt_name, stop_seconds
from ratchet_service.launchers.kubernetes import patch
from ratchet_service.launchers.kubernetes.mounts import TMP, mounted
from ratchet_service.launchers.kubernetes.settings import Site

Manifest = dict[str, Any]

JOB_ID: Final = "ratchet.dev/job-id"
EPOCH: Final = "ratchet.dev/epoch"
INSTANCE: Final = "ratchet.dev/instance"
JOB_NAME: Final = "ratchet.dev/job-name"
MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "ratchet"}
QUEUE: Final = "kueue.x-k8s.io/queue-name"
INDEX_VARIABLE: Final = "JOB_COMPLETION_INDEX"
"""The Job controller gives it to every container of an Indexed Job's pods."""

_COMPONENT: Final = {"app.kubernetes.io/name": "ratchet", "app.kubernetes.io/component": "worker"}
_UNREACHABLE: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_UNREACHABLE_SECONDS: Final = 30
"""Kubernetes' own default is 300: a job would wait five minutes for a node that is gone."""


def selector(instance: str) -> str:
    """What finds everything of one service."""
    labels = MANAGED_BY | {INSTANCE: instance}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def agent_command(launch: LaunchFile) -> list[str]:
    file = str(AttemptPaths(Path(launch.attempt_dir)).launch_file)
    return [launch.resolved.python, "-P", "-m", "ratchet_worker.agent", file, "--node-from", INDEX_VARIABLE]


def labels_of(site: Site, launch: LaunchFile) -> dict[str, str]:
    return _COMPONENT | MANAGED_BY | {
        INSTANCE: site.instance, JOB_ID: launch.job_id, EPOCH: str(launch.epoch),
    }  # fmt: skip


def job(site: Site, launch: LaunchFile) -> Manifest:
    spec, launcher = launch.spec, site.launcher(launch.spec)
    nodes = spec.world.nodes
    labels = launcher.labels | labels_of(site, launch)
    codes = sorted(code for code in CAUSE_OF_EXIT_CODE if code != 0)
    body: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": patch.AGENT, "operator": "In", "values": codes},
                },
            ]
        },
        "ttlSecondsAfterFinished": launcher.ttl_seconds_after_finished,
    }
    if launcher.queue is not None:
        labels[QUEUE] = launcher.queue
        body["suspend"] = True
    template = patch.apply(pod_template(site, launch), launcher.pod_patch)
    metadata = _metadata(site, launch, labels) | {"annotations": _annotations(launch, launcher)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body | {"template": template}}


def service(site: Site, launch: LaunchFile) -> Manifest | None:
    """Headless: gives the pods names, NAME-0.NAME and so on, from their first moment. One pod needs none."""
    if launch.spec.world.nodes == 1:
        return None
    labels = labels_of(site, launch)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {key: labels[key] for key in (JOB_ID, EPOCH, INSTANCE)},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(site, launch, labels), "spec": spec}


def secret(site: Site, launch: LaunchFile, values: dict[str, str]) -> Manifest | None:
    """Of this attempt alone, with the values that its spec takes from the service's environment."""
    if not values:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(site, launch, labels_of(site, launch)),
        "type": "Opaque",
        "immutable": True,
        "stringData": values,
    }


def pod_template(site: Site, launch: LaunchFile) -> Manifest:
    """The template before the job's own patch."""
    spec, launcher = launch.spec, site.launcher(launch.spec)
    seen = mounted(site, launch, launcher)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(stop_seconds(launch)),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(site, launcher),
        "containers": [_container(site, launch, launcher, seen.mounts)],
        "volumes": seen.volumes,
        "tolerations": _tolerations(launcher),
    }
    if spec.world.nodes > 1:
        pod["subdomain"] = attempt_name(launch.job_id, launch.epoch)
    optional = {
        "nodeSelector": launcher.node_selector,
        "priorityClassName": launcher.priority_class,
        "serviceAccountName": launcher.service_account,
        "imagePullSecrets": [{"name": name} for name in launcher.image_pull_secrets],
    }
    pod |= {key: value for key, value in optional.items() if value}
    metadata = {
        "labels": launcher.labels | labels_of(site, launch),
        "annotations": _annotations(launch, launcher),
    }
    return {"metadata": metadata, "spec": pod}


def _container(
    site: Site, launch: LaunchFile, launcher: KubernetesLauncherSpec, mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": patch.AGENT,
        "image": site.image(launch.spec),
        "imagePullPolicy": launcher.image_pull_policy,
        "command": agent_command(launch),
        "env": _env(launch),
        "resources": _resources(launch),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the end of what it printed outlives the pod's log
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _env(launch: LaunchFile) -> list[dict[str, Any]]:
    """HOME and USER: whoever asks for them finds no entry of this user in the image."""
    out: list[dict[str, Any]] = [
        {"name": names.NODE_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": TMP},
        {"name": "USER", "value": "ratchet"},
    ]
    for name, source in launch.spec.secrets.items():
        if source.from_secret is not None:
            key = {"name": source.from_secret.name, "key": source.from_secret.key}
        else:
            key = {"name": attempt_name(launch.job_id, launch.epoch), "key": name}
        out.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return out


def _resources(launch: LaunchFile) -> dict[str, Any]:
    """CPUs are asked for, not limited: a limit would stop threads in the middle of a step. Memory is both, so that a job that
    takes too much of it ends alone. GPUs are not divisible, and Kubernetes wants both to be equal."""
    resources, ranks = launch.spec.resources, launch.spec.world.ranks_per_node
    requests: dict[str, str] = {"cpu": str(ranks * (resources.cpus_per_rank or launch.resolved.threads_per_rank))}
    limits: dict[str, str] = {}
    if resources.memory is not None:
        requests["memory"] = limits["memory"] = resources.memory
    if resources.gpu is not None:
        requests[resources.gpu] = limits[resources.gpu] = str(ranks)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _pod_security(site: Site, launcher: KubernetesLauncherSpec) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": launcher.run_as_user or site.user,
        "runAsGroup": site.group,
        "fsGroup": site.settings.fs_group or site.group,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _tolerations(launcher: KubernetesLauncherSpec) -> list[dict[str, Any]]:
    given = {toleration.get("key") for toleration in launcher.tolerations}
    own = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNREACHABLE_SECONDS}
        for key in _UNREACHABLE
        if key not in given
    ]
    return [*launcher.tolerations, *own]


def _metadata(site: Site, launch: LaunchFile, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "name": attempt_name(launch.job_id, launch.epoch),
        "namespace": site.namespace(launch.spec),
        "labels": labels,
    }


def _annotations(launch: LaunchFile, launcher: KubernetesLauncherSpec) -> dict[str, str]:
    return launcher.annotations | {JOB_NAME: launch.spec.name}
