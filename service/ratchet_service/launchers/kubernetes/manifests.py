"""Makes the Kubernetes objects of a launch: a Job with one pod per node, a Service for the pods' names, a Secret. Restarts are
new attempts with new Jobs, so the Job itself allows none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars as names
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.launcher import KubernetesLauncherSpec
from ratchet_service.json_merge_patch import merge
from ratchet_service.launchers.base import attempt_name, stop_seconds
from ratchet_service.launchers.kubernetes import pod_patch
from ratchet_service.launchers.kubernetes.settings import Site
from ratchet_service.launchers.kubernetes.volumes import TMP, Mounted, max_disk_bytes, pod_volumes

Manifest = dict[str, Any]

JOB_ID: Final = "ratchet.dev/job-id"
ATTEMPT: Final = "ratchet.dev/attempt"
INSTANCE: Final = "ratchet.dev/instance"
JOB_NAME: Final = "ratchet.dev/job-name"
MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "ratchet"}
QUEUE: Final = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
QUEUE_TOPOLOGY: Final = {
    "required": "kueue.x-k8s.io/podset-required-topology",
    "preferred": "kueue.x-k8s.io/podset-preferred-topology",
}
INDEX_VARIABLE: Final = "JOB_COMPLETION_INDEX"
"""The Job controller sets it in every container of an Indexed Job's pods."""

_COMPONENT: Final = {"app.kubernetes.io/name": "ratchet", "app.kubernetes.io/component": "worker"}
_HOST: Final = "kubernetes.io/hostname"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_MEMORY_PER_RANK: Final = 2
"""GiB, requested if the spec names no memory: a pod that requests none is the first to be evicted."""
_DISK_REQUEST: Final = "1Gi"
_LOGS: Final = 2**30
"""Bytes of disk for output that is printed before the agent manages the logs."""
_UNREACHABLE: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_UNREACHABLE_SECONDS: Final = 30
"""Kubernetes' default is 300: a job would wait five minutes for a lost node."""


def label_selector(instance: str) -> str:
    """Return the label selector for all objects of one service. ``instance``: ``Site.instance``."""
    labels = MANAGED_BY | {INSTANCE: instance}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def agent_command(launch: LaunchFile) -> list[str]:
    """Return the command of the agent's container, the same on each node."""
    file = str(AttemptPaths(Path(launch.attempt_dir)).launch_file)
    return [launch.resolved.python, "-P", "-m", "ratchet_worker.agent", file, "--node-from", INDEX_VARIABLE]


def labels_of(site: Site, launch: LaunchFile) -> dict[str, str]:
    """Return the labels that all objects of this attempt have. The Job and its pods are found by them."""
    return _COMPONENT | MANAGED_BY | {
        INSTANCE: site.instance, JOB_ID: launch.job_id, ATTEMPT: str(launch.attempt),
    }  # fmt: skip


def job_manifest(site: Site, launch: LaunchFile) -> Manifest:
    """Return the attempt's Job, with the job's own patch applied. With a Kueue queue the Job is created suspended."""
    spec, launcher = launch.spec, site.effective_launcher(launch.spec)
    nodes = spec.world.nodes
    labels = launcher.labels | labels_of(site, launch)
    codes = sorted(code for code in CAUSE_OF_EXIT_CODE if code != 0)
    body: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # restarts are new attempts: with the policy Ignore the controller would create a new pod within this one
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            # disruptions first: an evicted pod mostly ends with 143, and the Job's condition should report the eviction
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": pod_patch.AGENT, "operator": "In", "values": codes},
                },
            ]
        },
        "ttlSecondsAfterFinished": launcher.ttl_seconds_after_finished,
    }
    if launcher.queue is not None:
        labels[QUEUE] = launcher.queue
        body["suspend"] = True
    if launcher.queue_priority is not None:
        labels[QUEUE_PRIORITY] = launcher.queue_priority
    template = _with_disk_limit(pod_patch.apply(pod_template(site, launch), launcher.pod_patch))
    if not site.settings.allow_host_access:
        _restrict_added_containers(template["spec"])
    metadata = _metadata(site, launch, labels) | {"annotations": _annotations(launch, launcher)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body | {"template": template}}


def service_manifest(site: Site, launch: LaunchFile) -> Manifest | None:
    """Return a headless Service that gives the pods DNS names; None for one node, which needs none."""
    if launch.spec.world.nodes == 1:
        return None
    labels = labels_of(site, launch)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {key: labels[key] for key in (JOB_ID, ATTEMPT, INSTANCE)},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(site, launch, labels), "spec": spec}


def owner_patch(job: Manifest) -> Manifest:
    """Return a merge patch that makes ``job``, as the server returned it, the owner of an object."""
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    return {"metadata": {"ownerReferences": [owner]}}


def secret_manifest(site: Site, launch: LaunchFile, values: dict[str, str]) -> Manifest | None:
    """Return the attempt's own Secret; None without values. ``values``: name -> value of the secrets from the service's
    environment."""
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
    """Return the pod template without the job's own patch and without the disk limit."""
    spec, launcher = launch.spec, site.effective_launcher(launch.spec)
    mounted_volumes = pod_volumes(site, launch, launcher)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(stop_seconds(launch)),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(site, launcher),
        "containers": [_container(site, launch, launcher, mounted_volumes)],
        "volumes": mounted_volumes.volumes,
        "tolerations": _tolerations(launch, launcher),
    }
    if spec.world.nodes > 1:
        pod["subdomain"] = attempt_name(launch.job_id, launch.attempt)
    optional = {
        "nodeSelector": launcher.node_selector,
        "affinity": _affinity(launch, launcher),
        "topologySpreadConstraints": _topology_spread(site, launch, launcher),
        "priorityClassName": launcher.priority_class,
        "serviceAccountName": launcher.service_account,
        "imagePullSecrets": [{"name": name} for name in launcher.image_pull_secrets],
    }
    pod |= {key: value for key, value in optional.items() if value}
    topology = {QUEUE_TOPOLOGY[how]: label for how, label in (launcher.queue_topology or {}).items()}
    metadata = {
        "labels": launcher.labels | labels_of(site, launch),
        "annotations": _annotations(launch, launcher) | topology,
    }
    return {"metadata": metadata, "spec": pod}


def _container(
    site: Site, launch: LaunchFile, launcher: KubernetesLauncherSpec, mounted_volumes: Mounted
) -> dict[str, Any]:
    """Return the agent's container, without the job's own patch."""
    return {
        "name": pod_patch.AGENT,
        "image": site.image(launch.spec),
        "imagePullPolicy": launcher.image_pull_policy,
        "command": agent_command(launch),
        "env": _env(launch),
        "resources": _resources(launch),
        "volumeMounts": mounted_volumes.mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the end of its output outlives the pod's log
        "securityContext": _container_security() | {"readOnlyRootFilesystem": True},
    }


def _env(launch: LaunchFile) -> list[dict[str, Any]]:
    """Return the variables of the agent's container, such as the job's secrets, but not the spec's ``env``."""
    out: list[dict[str, Any]] = [
        {"name": names.NODE_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": names.NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "HOME", "value": TMP},
        {"name": "USER", "value": "ratchet"},
    ]
    if launch.resolved.device == "cpu":  # else an image that requests all GPUs would see those of other jobs
        out.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    for name, source in launch.spec.secrets.items():
        if source.from_secret is not None:
            key = {"name": source.from_secret.name, "key": source.from_secret.key}
        else:
            key = {"name": attempt_name(launch.job_id, launch.attempt), "key": name}
        out.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return out


def _resources(launch: LaunchFile) -> dict[str, Any]:
    """Return requests and limits of the agent's container. CPUs have no limit: it would stop threads in the middle of a step."""
    resources, ranks = launch.spec.resources, launch.spec.world.ranks_per_node
    requests = {
        "cpu": str(ranks * (resources.cpus_per_rank or launch.resolved.threads_per_rank)),
        "memory": resources.memory or f"{_MEMORY_PER_RANK * ranks}Gi",
        "ephemeral-storage": _DISK_REQUEST,
    }
    limits: dict[str, str] = {}
    if resources.memory is not None:
        limits["memory"] = resources.memory
    if resources.gpu is not None:
        requests[resources.gpu] = limits[resources.gpu] = str(ranks)
    return {"requests": requests, "limits": limits}


def _with_disk_limit(template: Manifest) -> Manifest:
    """Limit the pod's disk usage, if all its directories have size limits, in ``template`` itself, and return the template."""
    disk = max_disk_bytes(template["spec"]["volumes"])
    if disk is not None:
        (agent,) = [one for one in template["spec"]["containers"] if one["name"] == pod_patch.AGENT]
        most = {"ephemeral-storage": f"{math.ceil((disk + _LOGS) / 2**20)}Mi"}
        agent["resources"]["limits"] = most | agent["resources"]["limits"]
    return template


def _container_security() -> dict[str, Any]:
    """Return the restrictions that each container's security context has by default. The pod's security context applies, too.
    Added containers do not get them if the site allows host access."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _restrict_added_containers(pod: dict[str, Any]) -> None:
    """Apply ``_container_security`` to the init containers of ``pod``, all of which the job's patch has added. Settings of their
    own stay. If such a container drops other capabilities, ``ALL`` is added to its list."""
    for container in pod.get("initContainers", ()):
        context = merge(_container_security(), container.get("securityContext", {}))
        dropped = dropped_capabilities(context)
        if dropped and not drops_all(dropped):
            context = merge(context, {"capabilities": {"drop": [*dropped, "ALL"]}})
        container["securityContext"] = context


def dropped_capabilities(context: Any) -> list[Any]:
    """Return ``capabilities.drop`` of a container's security context; empty if it has none, or something else in its place."""
    capabilities = context.get("capabilities") if isinstance(context, dict) else None
    dropped = capabilities.get("drop") if isinstance(capabilities, dict) else None
    return dropped if isinstance(dropped, list) else []


def drops_all(dropped: list[Any]) -> bool:
    """True if ``dropped`` (``dropped_capabilities``) names all capabilities. Case does not matter, as in container runtimes."""
    return any(isinstance(name, str) and name.upper() == "ALL" for name in dropped)


def _pod_security(site: Site, launcher: KubernetesLauncherSpec) -> dict[str, Any]:
    """Return the pod's security context: never root, but the user of the job's spec or of the site."""
    return {
        "runAsNonRoot": True,
        "runAsUser": launcher.run_as_user or site.user,
        "runAsGroup": site.group,
        "fsGroup": site.settings.fs_group or site.group,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _topology_spread(site: Site, launch: LaunchFile, launcher: KubernetesLauncherSpec) -> list[dict[str, Any]]:
    """Return the rules by which pods are spread over machines: ``launcher.topology_spread`` if it is set. Otherwise several nodes
    are spread evenly where possible; for one node there is no rule."""
    labels = labels_of(site, launch)
    selector_fields = {"labelSelector": {"matchLabels": {key: labels[key] for key in (JOB_ID, ATTEMPT, INSTANCE)}}}
    if launcher.topology_spread is not None:
        return [selector_fields | given for given in launcher.topology_spread]
    if launch.spec.world.nodes == 1:
        return []
    return [{"maxSkew": 1, "topologyKey": _HOST, "whenUnsatisfiable": "ScheduleAnyway"} | selector_fields]


def _affinity(launch: LaunchFile, launcher: KubernetesLauncherSpec) -> dict[str, Any]:
    """Return the job's affinity rules; if nodes are excluded, each alternative of its required node affinity excludes them."""
    if not launch.exclude_nodes:
        return launcher.affinity
    # by the nodes' names: the label kubernetes.io/hostname may have another value
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in launch.exclude_nodes]
    of_nodes = launcher.affinity.get("nodeAffinity") or {}
    terms = (of_nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    terms = [term | {"matchFields": [*(term.get("matchFields") or ()), *away]} for term in terms]
    return launcher.affinity | {"nodeAffinity": of_nodes | {_REQUIRED: {"nodeSelectorTerms": terms}}}


def _tolerations(launch: LaunchFile, launcher: KubernetesLauncherSpec) -> list[dict[str, Any]]:
    """Return the job's tolerations, and then Ratchet's own for GPU machines and for machines that do not answer. One of Ratchet's
    is left out if the job has a toleration with the same key."""
    given = {toleration.get("key") for toleration in launcher.tolerations}
    gpu = launch.spec.resources.gpu
    # Machines with GPU slices (nvidia.com/mig-1g.5gb) have the taint of the whole GPU.
    taints = dict.fromkeys((gpu, f"{gpu.partition('/')[0]}/gpu")) if gpu is not None else ()
    own: list[dict[str, Any]] = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
    own += [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNREACHABLE_SECONDS}
        for key in _UNREACHABLE
    ]
    return [*launcher.tolerations, *(toleration for toleration in own if toleration["key"] not in given)]


def _metadata(site: Site, launch: LaunchFile, labels: dict[str, str]) -> dict[str, Any]:
    """Return name, namespace and labels of an object."""
    return {
        "name": attempt_name(launch.job_id, launch.attempt),
        "namespace": site.namespace(launch.spec),
        "labels": labels,
    }


def _annotations(launch: LaunchFile, launcher: KubernetesLauncherSpec) -> dict[str, str]:
    """Return the annotations of the job's spec, and the one with the job's name."""
    return launcher.annotations | {JOB_NAME: launch.spec.name}
