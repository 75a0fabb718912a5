"""Applies ``launcher.pod_patch``, a job's own changes to its pods' template. It is a merge patch (RFC 7396), except that entries
of ``spec.containers``, ``spec.initContainers`` and ``spec.volumes`` are merged by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ratchet_service.json_merge_patch import merge

AGENT: Final = "agent"
"""Name of the agent's container."""

_NAMED_LISTS: Final = {("spec", "containers"), ("spec", "initContainers"), ("spec", "volumes")}
_FOLLOWS: Final = "Ratchet's handling of attempts depends on it"
_OWNED: Final[Mapping[tuple[str, ...], str]] = {
    ("metadata", "name"): "the Job controller names the pods",
    ("metadata", "namespace"): "use launcher.namespace",
    ("spec", "restartPolicy"): f"{_FOLLOWS}: restarts are new attempts",
    ("spec", "subdomain"): _FOLLOWS,
    ("spec", "hostname"): _FOLLOWS,
    ("spec", "terminationGracePeriodSeconds"): "it follows from the job's measured saves and policy.stop_grace",
    ("spec", "activeDeadlineSeconds"): "use policy.timeout",
    ("spec", "nodeName"): "use launcher.node_selector",
    ("spec", "nodeSelector"): "use launcher.node_selector",
    ("spec", "tolerations"): "use launcher.tolerations",
    ("spec", "affinity"): "use launcher.affinity",
    ("spec", "topologySpreadConstraints"): "use launcher.topology_spread",
    ("spec", "priorityClassName"): "use launcher.priority_class",
    ("spec", "serviceAccountName"): "use launcher.service_account",
    ("spec", "serviceAccount"): "use launcher.service_account",  # the deprecated name, which servers still accept
    ("spec", "priority"): "use launcher.priority_class",
    ("spec", "imagePullSecrets"): "use launcher.image_pull_secrets",
    ("spec", "securityContext", "runAsUser"): "use launcher.run_as_user",
}
_OWNED_OF_AGENT: Final[Mapping[tuple[str, ...], str]] = {
    ("command",): "it is the agent's",
    ("args",): "they are the agent's",
    ("image",): "use image",
    ("imagePullPolicy",): "use launcher.image_pull_policy",
    ("env",): "use env and secrets",
    ("volumeMounts",): "use volumes",
    ("workingDir",): "ranks run in the job's own directory",
    ("restartPolicy",): f"{_FOLLOWS}: restarts are new attempts",
    ("lifecycle",): "a container hook would use up the agent's time to save",
    ("livenessProbe",): "policy.step_deadline watches the ranks",
    ("startupProbe",): "policy.startup_deadline watches the ranks",
    ("resources", "requests", "cpu"): "use resources.cpus_per_rank",
    ("resources", "requests", "memory"): "use resources.memory",
    ("resources", "limits", "memory"): "use resources.memory",
    ("resources", "limits", "ephemeral-storage"): "use launcher.tmp_size",
}


def apply(template: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template with the patch applied, without checks. The result may share parts with ``template``."""
    plain = copy.deepcopy(patch)
    for where, name in _NAMED_LISTS:
        if isinstance(plain.get(where), dict) and isinstance(plain[where].get(name), list):
            plain[where][name] = _merge_by_name(template.get(where, {}).get(name, []), plain[where][name])
    merged: dict[str, Any] = merge(template, plain)
    return merged


def refused_fields(template: dict[str, Any], patch: dict[str, Any], gpu: str | None) -> Iterator[tuple[str, str]]:
    """Yield a JSON pointer, relative to the patch, and the reason for each part that these rules refuse. ``gpu``: the job's GPU
    resource."""
    yield from _touched_fields(patch, _OWNED, ())
    for key in template["metadata"]["labels"]:
        yield from _touched_fields(patch, {("metadata", "labels", key): "Ratchet finds its pods by it"}, ())
    for key in template["metadata"]["annotations"]:
        yield from _touched_fields(patch, {("metadata", "annotations", key): "it is Ratchet's"}, ())
    for where, name in sorted(_NAMED_LISTS):
        yield from _refused_in_list(template, patch, (where, name), gpu)


def _refused_in_list(
    template: dict[str, Any], patch: dict[str, Any], path: tuple[str, str], gpu: str | None
) -> Iterator[tuple[str, str]]:
    """As ``refused_fields``, for the entries of one list that is merged by name; ``path``: the list's keys."""
    within = patch.get(path[0])
    given = within.get(path[1], ()) if isinstance(within, dict) else ()
    if given == ():
        return
    if not isinstance(given, list):
        yield json_pointer(*path), "must be a list: its entries are merged by name"
        return
    ours = {entry["name"] for entry in template["spec"].get(path[1], [])}
    for i, entry in enumerate(given):
        here = (*path, str(i))
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            yield json_pointer(*here), "needs a name: entries are merged by it"
        elif path[1] == "containers" and name == AGENT:
            owned = dict(_OWNED_OF_AGENT)
            if gpu is not None:
                owned |= {("resources", kind, gpu): "use resources.gpu" for kind in ("limits", "requests")}
            yield from _touched_fields(entry, owned, here)
        elif path[1] == "containers":
            text = f"the pod's only container is {AGENT}: a sidecar is an entry of initContainers with restartPolicy: Always"
            yield json_pointer(*here), text
        elif name in ours:
            yield json_pointer(*here), f"{name} is Ratchet's own: take another name"


def _touched_fields(
    patch: Any, owned: Mapping[tuple[str, ...], str], prefix: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield pointer and reason for each field of ``owned`` that the patch at ``prefix`` sets, replaces or removes."""
    for path, reason in owned.items():
        at: Any = patch
        for depth, key in enumerate(path):
            if not isinstance(at, dict) or key not in at:
                break
            at = at[key]
            if depth + 1 == len(path) or not isinstance(at, dict):  # it is set, or a parent is replaced or removed
                yield json_pointer(*prefix, *path[: depth + 1]), reason
                break


def _merge_by_name(base: list[dict[str, Any]], patch: list[Any]) -> list[Any]:
    """Return the entries of ``base``, merged with those of ``patch`` that have the same name, and then the others."""
    out = {entry["name"]: entry for entry in base}
    for i, entry in enumerate(patch):
        key = entry.get("name", i) if isinstance(entry, dict) else i
        out[key] = merge(out.get(key), entry)
    return list(out.values())


def json_pointer(*path: str) -> str:
    """Return the JSON pointer (RFC 6901) of a path of keys and indices."""
    return "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in path)
