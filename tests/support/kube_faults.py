"""Faults of a Job that only an API server sees: what makes each, where it is found, and a word of what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pod_of(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["spec"]["template"]["spec"]
    return found


def rule(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["spec"]["podFailurePolicy"]["rules"][1]
    return found


def _no_backoff_limit(made: dict[str, Any]) -> None:
    rule(made)["action"] = "FailIndex"


def _not_indexed(made: dict[str, Any]) -> None:
    made["spec"] |= {"completionMode": "NonIndexed", "backoffLimitPerIndex": 1}


def _resources(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod_of(made)["containers"][0]["resources"]
    return found


SERVER_SEES: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "enumeration": (lambda j: j["spec"].update(completionMode="Numbered"), "spec/completionMode", "Indexed"),
    "OnFailure": (lambda j: pod_of(j).update(restartPolicy="OnFailure"), "spec/template/spec/restartPolicy", "Never"),
    "replacement": (
        lambda j: j["spec"].update(podReplacementPolicy="TerminatingOrFailed"), "spec/podReplacementPolicy", "Failed",
    ),
    "FailIndex": (_no_backoff_limit, "spec/podFailurePolicy/rules/1/action", "backoffLimitPerIndex"),
    "per index": (_not_indexed, "spec/backoffLimitPerIndex", "Indexed"),
    "code 0": (
        lambda j: rule(j)["onExitCodes"].update(values=[0, 1]), "spec/podFailurePolicy/rules/1/onExitCodes/values", "0",
    ),
    "container": (
        lambda j: rule(j)["onExitCodes"].update(containerName="worker"),
        "spec/podFailurePolicy/rules/1/onExitCodes/containerName", "worker",
    ),
    "long name": (lambda j: j["metadata"].update(name="a" * 62), "metadata/name", "63"),
    "GPU request": (
        lambda j: _resources(j)["requests"].update({"nvidia.com/gpu": "2"}),
        "spec/template/spec/containers/0/resources/requests/nvidia.com/gpu", "must equal",
    ),
    "quantity": (
        lambda j: _resources(j)["limits"].update(memory="64GB"),
        "spec/template/spec/containers/0/resources/limits/memory", "quantity",
    ),
    "subdomain": (lambda j: pod_of(j).update(subdomain="Team.A"), "spec/template/spec/subdomain", "label"),
    "no containers": (lambda j: pod_of(j).update(containers=[]), "spec/template/spec/containers", "at least one"),
}  # fmt: skip
