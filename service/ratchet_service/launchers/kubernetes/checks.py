"""What an API server refuses in a Job, and only it: neither the published schemas nor the client's models know these rules.

Checked on the finished manifest, after a job's own patch, so that a fault is told when the job is submitted to Ratchet and not
when its turn has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_LENGTH: Final = 63
_QUANTITY: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_DIVISIBLE: Final = ("cpu", "memory", "ephemeral-storage")
_ENUMS: Final[dict[str, tuple[str, ...]]] = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "completionMode": ("Indexed", "NonIndexed"),
    "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "preemptionPolicy": ("PreemptLowerPriority", "Never"),
    "fsGroupChangePolicy": ("OnRootMismatch", "Always"),
    "whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "mountPropagation": ("None", "HostToContainer", "Bidirectional"),
    "protocol": ("TCP", "UDP", "SCTP"),
}
_RULE_ENUMS: Final[dict[str, tuple[str, ...]]] = {
    "action": ("FailJob", "FailIndex", "Ignore", "Count"),
    "operator": ("In", "NotIn"),
}
_TOLERATION_ENUMS: Final[dict[str, tuple[str, ...]]] = {
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "operator": ("Exists", "Equal", "Lt", "Gt"),
}


@dataclass(frozen=True)
class Fault:
    """``path``: keys and indices from the Job's root."""

    path: tuple[str, ...]
    detail: str


def faults(job: dict[str, Any]) -> list[Fault]:
    """Everything in the Job that a server would refuse."""
    return [*_job(job), *_pod(job["spec"]["template"]["spec"], ("spec", "template", "spec"))]


def quantity(text: object) -> bool:
    """Is it one, as Kubernetes writes them: ``100m``, ``2``, ``1.5Gi``, ``1e3``?"""
    return _QUANTITY.fullmatch(str(text)) is not None


def label(text: str) -> bool:
    """Is it a DNS label (RFC 1123)?"""
    return len(text) <= _LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def _job(job: dict[str, Any]) -> Iterator[Fault]:
    spec, name = job["spec"], job["metadata"]["name"]
    indexed = spec.get("completionMode") == "Indexed"
    last = f"{name}-{max(spec.get('completions', 1) - 1, 0)}"
    if indexed and not label(last):
        text = f"the last pod's host name would be {last}, which is no DNS label of at most {_LABEL_LENGTH} characters"
        yield Fault(("metadata", "name"), text)
    for key in ("completionMode", "podReplacementPolicy"):
        yield from _enum(spec, key, ("spec",), _ENUMS[key])
    if "backoffLimitPerIndex" in spec and not indexed:
        yield Fault(("spec", "backoffLimitPerIndex"), "works with completionMode Indexed only")
    policy = spec.get("podFailurePolicy")
    if policy is None:
        return
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") != "Never":
        text = f"must be Never with a podFailurePolicy, not {pod.get('restartPolicy')}"
        yield Fault(("spec", "template", "spec", "restartPolicy"), text)
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield Fault(("spec", "podReplacementPolicy"), "must be Failed with a podFailurePolicy")
    containers = {c.get("name") for key in ("containers", "initContainers") for c in pod.get(key) or ()}
    for i, rule in enumerate(policy.get("rules", ())):
        yield from _rule(rule, ("spec", "podFailurePolicy", "rules", str(i)), spec, containers)


def _rule(
    rule: dict[str, Any], path: tuple[str, ...], spec: dict[str, Any], containers: set[str | None]
) -> Iterator[Fault]:
    yield from _enum(rule, "action", path, _RULE_ENUMS["action"])
    if rule.get("action") == "FailIndex" and "backoffLimitPerIndex" not in spec:
        yield Fault((*path, "action"), "FailIndex needs backoffLimitPerIndex")
    codes = rule.get("onExitCodes")
    if codes is None:
        return
    here = (*path, "onExitCodes")
    yield from _enum(codes, "operator", here, _RULE_ENUMS["operator"])
    if codes.get("operator") == "In" and 0 in codes.get("values", ()):
        yield Fault((*here, "values"), "0 is success and cannot be matched by In")
    name = codes.get("containerName")
    if name is not None and name not in containers:
        yield Fault((*here, "containerName"), f"there is no container {name} in the pod")


def _pod(pod: dict[str, Any], path: tuple[str, ...]) -> Iterator[Fault]:
    if not pod.get("containers"):
        yield Fault((*path, "containers"), "a pod needs at least one container")
    subdomain = pod.get("subdomain")
    if subdomain is not None and not label(str(subdomain)):
        text = f"{subdomain!r} is no DNS label (lower case letters, digits and '-', at most {_LABEL_LENGTH})"
        yield Fault((*path, "subdomain"), text)
    for i, toleration in enumerate(pod.get("tolerations") or ()):
        yield from _toleration(toleration, (*path, "tolerations", str(i)))
    for list_ in ("containers", "initContainers"):
        for i, container in enumerate(pod.get(list_) or ()):
            yield from _container(container, (*path, list_, str(i)))
    for i, volume in enumerate(pod.get("volumes") or ()):
        size = (volume.get("emptyDir") or {}).get("sizeLimit")
        if size is not None and not quantity(size):
            yield _bad_quantity((*path, "volumes", str(i), "emptyDir", "sizeLimit"), size)
    yield from _enums_within(pod, path)


def _container(container: dict[str, Any], path: tuple[str, ...]) -> Iterator[Fault]:
    if not container.get("image"):
        yield Fault((*path, "image"), "a container needs an image")
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            here = (*path, "resources", kind, name)
            if not quantity(amount):
                yield _bad_quantity(here, amount)
            elif "/" in name and requests.get(name, limits.get(name)) != limits.get(name) and kind == "requests":
                text = f"the request of {name} ({amount}) must equal its limit ({limits.get(name, 'none')})"
                yield Fault(here, text)
            elif "/" not in name and name not in _DIVISIBLE and not name.startswith("hugepages-"):
                yield Fault(here, f"{name} is no resource: a device has a domain before its name, like nvidia.com/gpu")
    paths = [mount.get("mountPath") for mount in container.get("volumeMounts") or ()]
    for i, mount_path in enumerate(paths):
        if mount_path in paths[:i]:
            yield Fault((*path, "volumeMounts", str(i), "mountPath"), f"{mount_path} is mounted twice")


def _toleration(toleration: dict[str, Any], path: tuple[str, ...]) -> Iterator[Fault]:
    known = {"key", "operator", "value", "effect", "tolerationSeconds"}
    for key in sorted(set(toleration) - known):
        yield Fault((*path, key), f"a toleration has no {key}; it has {', '.join(sorted(known))}")
    for key, values in _TOLERATION_ENUMS.items():
        if toleration.get(key):
            yield from _enum(toleration, key, path, values)
    if not toleration.get("key") and toleration.get("operator") != "Exists":
        yield Fault((*path, "operator"), "without a key it must be Exists")
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield Fault((*path, "effect"), "must be NoExecute where tolerationSeconds is given")


def _enums_within(value: Any, path: tuple[str, ...]) -> Iterator[Fault]:
    """Enumerations that have one meaning wherever they stand in a pod."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _enums_within(item, (*path, str(i)))
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str):
                yield from _enum(value, key, path, _ENUMS.get(key, (item,)))
            elif key not in ("labels", "annotations", "nodeSelector", "matchLabels"):
                yield from _enums_within(item, (*path, key))


def _enum(within: dict[str, Any], key: str, path: tuple[str, ...], known: tuple[str, ...]) -> Iterator[Fault]:
    if key in within and within[key] not in known:
        yield Fault((*path, key), f"{within[key]!r} must be one of {', '.join(known)}")


def _bad_quantity(path: tuple[str, ...], value: object) -> Fault:
    return Fault(path, f"{value!r} is no quantity: a number with a suffix like m, Mi or Gi, or none")
