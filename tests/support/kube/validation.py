"""What a real server refuses in a Job, and what it fills in. Faults that neither the client's models nor the schemas see.

Wording and order follow the API server's own answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.support.kube.store import JOBS, ApiError, Object, Resource

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
_ENUMS = {
    "completionMode": ("Indexed", "NonIndexed"),
    "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
}
_FIELD_PATHS = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])|spec\.(nodeName|serviceAccountName)|status\.(hostIP|podIP)s?"
)
Fault = tuple[str, str, str]  # field, reason, message


def check(resource: Resource, made: Object) -> None:
    """Raises ``ApiError``: 400 for what cannot be decoded, 422 with every fault for the rest."""
    name = made.get("metadata", {}).get("name", "")
    if resource == JOBS:
        for quantity in _quantities(made):
            if _QUANTITY.fullmatch(str(quantity)) is None:
                raise ApiError(
                    400, "BadRequest", 'Job in version "v1" cannot be handled as a Job: quantities must match the regular '
                    "expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
                )  # fmt: skip
    faults = [*_metadata(made), *(_job(made) if resource == JOBS else ())]
    if faults:
        causes = [{"reason": reason, "message": message, "field": field} for field, reason, message in faults]
        text = ", ".join(f"{field}: {message}" for field, _, message in faults)
        message = f'{resource.kind}{"." + resource.group if resource.group else ""} "{name}" is invalid: '
        message += f"[{text}]" if len(faults) > 1 else text
        details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": causes}
        raise ApiError(422, "Invalid", message, details)


def _invalid(field: str, value: Any, why: str) -> Fault:
    shown = f'"{value}"' if isinstance(value, str) else value
    return field, "FieldValueInvalid", f"Invalid value: {shown}: {why}"


def _unsupported(field: str, value: Any, *known: str) -> Fault:
    values = ", ".join(f'"{k}"' for k in known)
    return field, "FieldValueNotSupported", f'Unsupported value: "{value}": supported values: {values}'


def _required(field: str, why: str = "") -> Fault:
    return field, "FieldValueRequired", f"Required value{': ' + why if why else ''}"


def _metadata(made: Object) -> Iterator[Fault]:
    metadata = made.get("metadata", {})
    name = metadata.get("name", "")
    if not name:
        yield _required("metadata.name", "name or generateName is required")
    elif len(name) > 253 or not all(_LABEL.fullmatch(part) for part in name.split(".")):
        yield _invalid(
            "metadata.name", name, "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters"
        )
    for key, value in (metadata.get("labels") or {}).items():
        if (
            not isinstance(value, str)
            or len(value) > 63
            or not re.fullmatch(r"([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)?", value)
        ):
            yield _invalid("metadata.labels", value, f"a valid label must be at most 63 characters ({key})")


def _quantities(made: Object) -> Iterator[Any]:
    pod = made.get("spec", {}).get("template", {}).get("spec", {})
    for container in pod.get("containers") or ():
        for kind in ("limits", "requests"):
            yield from (container.get("resources", {}).get(kind) or {}).values()
    for volume in pod.get("volumes") or ():
        if "sizeLimit" in (volume.get("emptyDir") or {}):
            yield volume["emptyDir"]["sizeLimit"]


def _job(made: Object) -> Iterator[Fault]:
    spec, name = made.get("spec", {}), made.get("metadata", {}).get("name", "")
    template = spec.get("template", {})
    pod = template.get("spec", {})
    indexed = spec.get("completionMode") == "Indexed"
    for key, known in _ENUMS.items():
        if key in spec and spec[key] not in known:
            yield _unsupported(f"spec.{key}", spec[key], *known)
    if indexed and len(f"{name}-{max(spec.get('completions', 1) - 1, 0)}") > 63:
        yield _invalid(
            "metadata.name",
            name,
            "will not able to create pod with invalid DNS label: must be no more than 63 characters",
        )
    if spec.get("backoffLimitPerIndex") is not None and not indexed:
        yield _invalid("spec.backoffLimitPerIndex", spec["backoffLimitPerIndex"], "requires indexed completion mode")
    if "podFailurePolicy" in spec:
        yield from _failure_policy(spec, pod)
    yield from _metadata({"metadata": {"name": "template", **(template.get("metadata") or {})}})
    yield from _pod(pod, "spec.template.spec")


def _failure_policy(spec: Object, pod: Object) -> Iterator[Fault]:
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield _unsupported("spec.podReplacementPolicy", spec["podReplacementPolicy"], "Failed")
    if pod.get("restartPolicy") == "OnFailure":
        yield _invalid(
            "spec.template.spec.restartPolicy",
            "OnFailure",
            'only "Never" is supported when podFailurePolicy is specified',
        )
    containers = {c.get("name") for c in [*(pod.get("containers") or ()), *(pod.get("initContainers") or ())]}
    for i, rule in enumerate(spec["podFailurePolicy"].get("rules", ())):
        at = f"spec.podFailurePolicy.rules[{i}]"
        if rule.get("action") not in ("Ignore", "FailJob", "FailIndex", "Count"):
            yield _unsupported(f"{at}.action", rule.get("action"), "Count", "FailIndex", "FailJob", "Ignore")
        if rule.get("action") == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
            yield _invalid(f"{at}.action", "FailIndex", "requires the backoffLimitPerIndex to be set")
        if ("onExitCodes" in rule) == bool(rule.get("onPodConditions")):
            yield _invalid(at, "", "specifying one of OnExitCodes and OnPodConditions is required, and not both")
        codes = rule.get("onExitCodes")
        if codes is not None:
            yield from _exit_codes(f"{at}.onExitCodes", codes, containers)


def _exit_codes(at: str, codes: Object, containers: set[str]) -> Iterator[Fault]:
    values = codes.get("values", [])
    if codes.get("operator") not in ("In", "NotIn"):
        yield _unsupported(f"{at}.operator", codes.get("operator"), "In", "NotIn")
    if codes.get("containerName") is not None and codes["containerName"] not in containers:
        why = "must be one of the container or initContainer names in the pod template"
        yield _invalid(f"{at}.containerName", codes["containerName"], why)
    for i, value in enumerate(values):
        if value == 0 and codes.get("operator") == "In":
            yield _invalid(f"{at}.values[{i}]", 0, "must not be 0 for the In operator")
    if not values:
        yield _invalid(f"{at}.values", "", "at least one value is required")
    if values != sorted(set(values)):
        yield _invalid(f"{at}.values", values, "must be ordered")


def _pod(pod: Object, at: str) -> Iterator[Fault]:
    containers = pod.get("containers") or []
    if not containers:
        yield _required(f"{at}.containers")
    if pod.get("restartPolicy", "Always") not in ("OnFailure", "Never"):
        if pod.get("restartPolicy", "Always") == "Always":
            yield _required(f"{at}.restartPolicy", 'valid values: "OnFailure", "Never"')
        else:
            yield _unsupported(f"{at}.restartPolicy", pod["restartPolicy"], "OnFailure", "Never")
    if "subdomain" in pod and (not _LABEL.fullmatch(pod["subdomain"]) or len(pod["subdomain"]) > 63):
        why = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
        yield _invalid(f"{at}.subdomain", pod["subdomain"], why)
    volumes = {v.get("name") for v in pod.get("volumes") or ()}
    for i, volume in enumerate(pod.get("volumes") or ()):
        if len(volume) != 2:
            yield _required(f"{at}.volumes[{i}]", "must specify exactly one volume type")
    for i, container in enumerate(containers):
        yield from _container(container, f"{at}.containers[{i}]", volumes)


def _container(container: Object, at: str, volumes: set[str]) -> Iterator[Fault]:
    if not container.get("image"):
        yield _required(f"{at}.image")
    if container.get("imagePullPolicy", "Always") not in ("Always", "IfNotPresent", "Never"):
        yield _unsupported(f"{at}.imagePullPolicy", container["imagePullPolicy"], "Always", "IfNotPresent", "Never")
    seen: set[str] = set()
    for i, mount in enumerate(container.get("volumeMounts") or ()):
        if mount.get("name") not in volumes:
            yield f"{at}.volumeMounts[{i}].name", "FieldValueNotFound", f'Not found: "{mount.get("name")}"'
        if mount.get("mountPath") in seen:
            yield _invalid(f"{at}.volumeMounts[{i}].mountPath", mount["mountPath"], "must be unique")
        if mount.get("subPath", "").startswith("/") or ".." in mount.get("subPath", "").split("/"):
            yield _invalid(f"{at}.volumeMounts[{i}].subPath", mount["subPath"], "must be a relative path without '..'")
        seen.add(mount.get("mountPath", ""))
    for i, variable in enumerate(container.get("env") or ()):
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if not isinstance(variable.get("value", ""), str):
            raise ApiError(
                400,
                "BadRequest",
                f"cannot unmarshal {variable['value']!r} into Go struct field EnvVar.value of type string",
            )
        if path is not None and not _FIELD_PATHS.fullmatch(path):
            yield _invalid(f"{at}.env[{i}].valueFrom.fieldRef.fieldPath", path, "error converting fieldPath")
    resources = container.get("resources", {})
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name in {*limits, *requests}:
        if "/" not in name:
            continue
        if name not in limits:
            yield _required(f"{at}.resources.limits", "Limit must be set for non overcommitable resources")
        elif name in requests and requests[name] != limits[name]:
            why = f"must be equal to {name} limit of {limits[name]}"
            yield _invalid(f"{at}.resources.requests", requests[name], why)
