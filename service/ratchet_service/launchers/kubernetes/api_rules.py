"""Some rules for a Job that only an API server enforces, so that faults are reported when a job is submitted to Ratchet."""

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
_FREE_MAPS: Final = ("labels", "annotations", "nodeSelector", "matchLabels", "volumeAttributes", "options")
"""Their keys are the user's, or those of a volume's driver."""
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
    """A reason for which a server would refuse the Job. ``path``: keys and indices to the faulty value."""

    path: tuple[str, ...]
    detail: str


def find_faults(job: dict[str, Any]) -> list[Fault]:
    """Return the faults of the complete manifest ``job`` by these rules. A server may have further reasons to refuse it."""
    return [*_check_job(job), *_check_pod(job["spec"]["template"]["spec"], ("spec", "template", "spec"))]


def is_quantity(text: object) -> bool:
    """True if ``text`` is a Kubernetes quantity: ``100m``, ``2``, ``1.5Gi``, ``1e3``."""
    return _QUANTITY.fullmatch(str(text)) is not None


def is_dns_label(text: str) -> bool:
    """True if ``text`` is a DNS label (RFC 1123)."""
    return len(text) <= _LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def _check_job(job: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of the Job itself and of its pod failure policy."""
    spec, name = job["spec"], job["metadata"]["name"]
    indexed = spec.get("completionMode") == "Indexed"
    last = f"{name}-{max(spec.get('completions', 1) - 1, 0)}"
    if indexed and not is_dns_label(last):
        text = (
            f"the last pod's host name would be {last}, which is not a DNS label of at most {_LABEL_LENGTH} characters"
        )
        yield Fault(("metadata", "name"), text)
    for key in ("completionMode", "podReplacementPolicy"):
        yield from _check_enum(spec, key, ("spec",), _ENUMS[key])
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
        yield from _check_rule(rule, ("spec", "podFailurePolicy", "rules", str(i)), spec, containers)


def _check_rule(
    rule: dict[str, Any], path: tuple[str, ...], spec: dict[str, Any], containers: set[str | None]
) -> Iterator[Fault]:
    """Yield the faults of one rule of the pod failure policy. ``spec``: the Job's. ``containers``: names of the
    pod's containers."""
    yield from _check_enum(rule, "action", path, _RULE_ENUMS["action"])
    if rule.get("action") == "FailIndex" and "backoffLimitPerIndex" not in spec:
        yield Fault((*path, "action"), "FailIndex needs backoffLimitPerIndex")
    codes = rule.get("onExitCodes")
    if codes is None:
        return
    here = (*path, "onExitCodes")
    yield from _check_enum(codes, "operator", here, _RULE_ENUMS["operator"])
    if codes.get("operator") == "In" and 0 in codes.get("values", ()):
        yield Fault((*here, "values"), "0 is success and cannot be matched by In")
    name = codes.get("containerName")
    if name is not None and name not in containers:
        yield Fault((*here, "containerName"), f"there is no container {name} in the pod")


def _check_pod(pod: dict[str, Any], path: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the faults of the pod's spec, which is at ``path``."""
    if not pod.get("containers"):
        yield Fault((*path, "containers"), "a pod needs at least one container")
    subdomain = pod.get("subdomain")
    if subdomain is not None and not is_dns_label(str(subdomain)):
        text = f"{subdomain!r} is not a DNS label (lower case letters, digits and '-', at most {_LABEL_LENGTH})"
        yield Fault((*path, "subdomain"), text)
    for i, toleration in enumerate(pod.get("tolerations") or ()):
        yield from _check_toleration(toleration, (*path, "tolerations", str(i)))
    for list_ in ("containers", "initContainers"):
        for i, container in enumerate(pod.get(list_) or ()):
            yield from _check_container(container, (*path, list_, str(i)))
    for i, volume in enumerate(pod.get("volumes") or ()):
        size = (volume.get("emptyDir") or {}).get("sizeLimit")
        if size is not None and not is_quantity(size):
            yield _bad_quantity((*path, "volumes", str(i), "emptyDir", "sizeLimit"), size)
    yield from _check_enums(pod, path)


def _check_container(container: dict[str, Any], path: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the faults of one container."""
    if not container.get("image"):
        yield Fault((*path, "image"), "a container needs an image")
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            here = (*path, "resources", kind, name)
            if not is_quantity(amount):
                yield _bad_quantity(here, amount)
            elif "/" in name and requests.get(name, limits.get(name)) != limits.get(name) and kind == "requests":
                text = f"the request of {name} ({amount}) must equal its limit ({limits.get(name, 'none')})"
                yield Fault(here, text)
            elif "/" not in name and name not in _DIVISIBLE and not name.startswith("hugepages-"):
                yield Fault(
                    here, f"{name} is not a resource name: a device has a domain before its name, like nvidia.com/gpu"
                )
    paths = [mount.get("mountPath") for mount in container.get("volumeMounts") or ()]
    for i, mount_path in enumerate(paths):
        if mount_path in paths[:i]:
            yield Fault((*path, "volumeMounts", str(i), "mountPath"), f"{mount_path} is mounted twice")


def _check_toleration(toleration: dict[str, Any], path: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the faults of one toleration."""
    known = {"key", "operator", "value", "effect", "tolerationSeconds"}
    for key in sorted(set(toleration) - known):
        yield Fault((*path, key), f"a toleration has no {key}; it has {', '.join(sorted(known))}")
    for key, values in _TOLERATION_ENUMS.items():
        if toleration.get(key):
            yield from _check_enum(toleration, key, path, values)
    if not toleration.get("key") and toleration.get("operator") != "Exists":
        yield Fault((*path, "operator"), "without a key it must be Exists")
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield Fault((*path, "effect"), "must be NoExecute if tolerationSeconds is set")


def _check_enums(value: Any, path: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the faults of enumerations in ``value``, any part of the pod's spec."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _check_enums(item, (*path, str(i)))
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str):
                yield from _check_enum(value, key, path, _ENUMS.get(key, (item,)))
            elif key not in _FREE_MAPS:
                yield from _check_enums(item, (*path, key))


def _check_enum(fields: dict[str, Any], key: str, path: tuple[str, ...], allowed: tuple[str, ...]) -> Iterator[Fault]:
    """Yield a fault if ``fields`` has the key with a value other than those allowed."""
    if key in fields and fields[key] not in allowed:
        yield Fault((*path, key), f"{fields[key]!r} must be one of {', '.join(allowed)}")


def _bad_quantity(path: tuple[str, ...], value: object) -> Fault:
    """Return the fault of a value that is not a quantity."""
    return Fault(path, f"{value!r} is not a quantity: use a number, optionally with a suffix like m, Mi or Gi")
