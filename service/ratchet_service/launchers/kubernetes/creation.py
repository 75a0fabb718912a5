"""What is made for an attempt in the cluster, in an order that a crash may cut anywhere: the Secret and the Service, which do
nothing by themselves, then the Job, which then owns them. All have the attempt's name, so that what is there already is found,
and taken away by it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ratchet_contract.messages import LaunchFile
from ratchet_service.launchers.base import EngineFull, EngineUnreachable, LaunchError
from ratchet_service.launchers.kubernetes import manifests
from ratchet_service.launchers.kubernetes.api import Api, Json, Refusal
from ratchet_service.launchers.kubernetes.settings import Site
from ratchet_service.launchers.kubernetes.states import USED_UP

JOBS = "/apis/batch/v1/namespaces/{}/jobs"
PODS = "/api/v1/namespaces/{}/pods"
SECRETS = "/api/v1/namespaces/{}/secrets"
SERVICES = "/api/v1/namespaces/{}/services"

_HINTS = {
    400: "it cannot read the manifest",
    404: "is there such a namespace?",
}
_NO_RIGHT = re.compile(r"\bcannot \w+ resource\b")
"""Of the authorizer; what else is forbidden says why."""


def told(refusal: Refusal) -> str:
    """What was refused, in a sentence for people."""
    hint = "the service's account lacks a right" if _NO_RIGHT.search(refusal.message) else _HINTS.get(refusal.code)
    return f"Kubernetes refuses ({refusal.code}{f': {hint}' if hint else f' {refusal.reason}'}): {refusal.message}"


def create(api: Api, site: Site, launch: LaunchFile, values: dict[str, str]) -> Json:
    """The attempt's Job, made now or before; ``values`` go into its Secret. Raises ``LaunchError``, ``EngineFull`` while
    a quota has no room for one object more."""
    secret, service = manifests.secret(site, launch, values), manifests.service(site, launch)
    try:
        if secret is not None and _create(api, SECRETS, secret) is None:
            # Of a launch that was cut short, by a process that had perhaps other values.
            api.delete(_path(SECRETS, secret))
            _create(api, SECRETS, secret)
        if service is not None:
            _create(api, SERVICES, service)
        job = _create_job(api, site, launch)
    except Refusal as refusal:
        if refusal.code == 403 and USED_UP in refusal.message:
            raise EngineFull(told(refusal)) from None
        raise LaunchError(told(refusal)) from None
    for kind, made in ((SECRETS, secret), (SERVICES, service)):
        if made is not None:
            # Only for where this service never comes to take them away itself.
            with suppress(Refusal, EngineUnreachable):
                api.patch(_path(kind, made), manifests.owned_by(job))
    return job


def clear(api: Api, site: Site, name: str) -> None:
    """Take away what was made beside the Job."""
    for namespace in site.namespaces:
        for kind in (SECRETS, SERVICES):
            delete(api, f"{kind.format(namespace)}/{name}")


def delete(api: Api, path: str, **query: str | int) -> bool:
    """False: there is no such object. A refusal, as of a right that is missing, raises ``EngineUnreachable``: nothing is known
    then of what would have been deleted."""
    try:
        return api.delete(path, **query)
    except Refusal as refusal:
        if refusal.code == 409:  # it changes at this moment
            return True
        raise EngineUnreachable(told(refusal)) from None


def find_job(api: Api, namespace: str, name: str) -> Json | None:
    """The Job as the server has it now; None: there is none. A refusal raises ``EngineUnreachable``."""
    try:
        return api.get(f"{JOBS.format(namespace)}/{name}")
    except Refusal as refusal:
        if refusal.code == 404:
            return None
        raise EngineUnreachable(told(refusal)) from None


def hand_over(site: Site, launch: LaunchFile) -> None:
    """A service that runs as root gives the job's directories to the user of the pods. Raises ``OSError``."""
    if os.getuid() != 0:
        return
    job, attempt = Path(launch.job_root), Path(launch.attempt_dir)
    for path in {job, *job.iterdir(), attempt.parent, attempt, *attempt.iterdir()}:
        os.chown(path, site.user, site.group, follow_symlinks=False)


def _create(api: Api, kind: str, manifest: Json) -> Json | None:
    """None: an object of that name is there."""
    try:
        return api.create(kind.format(manifest["metadata"]["namespace"]), manifest)
    except Refusal as refusal:
        if refusal.code == 409 and refusal.reason == "AlreadyExists":
            return None
        raise


def _create_job(api: Api, site: Site, launch: LaunchFile) -> Json:
    wanted = manifests.job(site, launch)
    made = _create(api, JOBS, wanted)
    if made is not None:
        return made
    found = api.get(_path(JOBS, wanted))
    labels, own = found["metadata"].get("labels") or {}, manifests.labels_of(site, launch)
    if {key: labels.get(key) for key in own} != own:
        name, namespace = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
        raise LaunchError(f"the Job {name} is there already in {namespace}, and is not this service's: delete it")
    return found


def _path(kind: str, manifest: Json) -> str:
    return f"{kind.format(manifest['metadata']['namespace'])}/{manifest['metadata']['name']}"
