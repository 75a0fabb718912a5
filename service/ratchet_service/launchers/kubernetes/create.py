"""Creates an attempt's objects in the cluster, in an order that is safe if a crash interrupts it: first the Secret and the
Service, which do nothing by themselves, then the Job, which becomes their owner."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ratchet_contract.protocol.messages import LaunchFile
from ratchet_service.launchers.base import EngineFull, EngineUnreachable, LaunchError
from ratchet_service.launchers.kubernetes import manifests
from ratchet_service.launchers.kubernetes.client import Api, Json, Refusal
from ratchet_service.launchers.kubernetes.job_status import QUOTA_EXCEEDED
from ratchet_service.launchers.kubernetes.settings import Site

JOBS = "/apis/batch/v1/namespaces/{}/jobs"
PODS = "/api/v1/namespaces/{}/pods"
SECRETS = "/api/v1/namespaces/{}/secrets"
SERVICES = "/api/v1/namespaces/{}/services"

_HINTS = {
    400: "it cannot read the manifest",
    404: "check that the namespace exists",
}
_NO_RIGHT = re.compile(r"\bcannot \w+ resource\b")
"""Matches the authorizer's messages; other refusals with 403 explain themselves."""


def refusal_message(refusal: Refusal) -> str:
    """Return the refusal as a message for users."""
    hint = "the service's account lacks a permission" if _NO_RIGHT.search(refusal.message) else _HINTS.get(refusal.code)
    return f"Kubernetes refuses ({refusal.code}{f': {hint}' if hint else f' {refusal.reason}'}): {refusal.message}"


def create_objects(api: Api, site: Site, launch: LaunchFile, values: dict[str, str]) -> Json:
    """Create the attempt's Job and, where it needs them, Secret and Service, and return the Job. Existing ones are kept, but the
    Secret is replaced. ``values``: secret's name -> value. Raises ``EngineFull`` while a quota is used up, ``LaunchError`` and
    ``EngineUnreachable``; objects that were created before the error remain."""
    secret, service = manifests.secret_manifest(site, launch, values), manifests.service_manifest(site, launch)
    try:
        if secret is not None and _create_if_absent(api, SECRETS, secret) is None:
            # Left by an interrupted launch, of a process that perhaps had other values.
            api.delete(_object_path(SECRETS, secret))
            if _create_if_absent(api, SECRETS, secret) is None:
                metadata = secret["metadata"]
                raise EngineUnreachable(
                    f"the old Secret {metadata['name']} in {metadata['namespace']} is still being deleted: if this lasts, remove "
                    "its finalizers"
                )
        if service is not None:
            _create_if_absent(api, SERVICES, service)
        job = _create_job(api, site, launch)
    except Refusal as refusal:
        if refusal.code == 403 and QUOTA_EXCEEDED in refusal.message:
            raise EngineFull(refusal_message(refusal)) from None
        raise LaunchError(refusal_message(refusal)) from None
    for kind, made in ((SECRETS, secret), (SERVICES, service)):
        if made is not None:
            # Only for the case that this service never deletes them itself.
            with suppress(Refusal, EngineUnreachable):
                api.patch(_object_path(kind, made), manifests.owner_patch(job))
    return job


def delete_secret_and_service(api: Api, site: Site, name: str) -> None:
    """Request the deletion of the attempt's Secret and Service, in all namespaces that jobs may use. Raises
    ``EngineUnreachable``."""
    for namespace in site.namespaces:
        for kind in (SECRETS, SERVICES):
            delete_object(api, f"{kind.format(namespace)}/{name}")


def delete_object(api: Api, path: str, **query: str | int) -> bool:
    """Request the deletion of an object, and return True if it exists. Raises ``EngineUnreachable``."""
    try:
        return api.delete(path, **query)
    except Refusal as refusal:
        if refusal.code == 409:  # a concurrent change; the object exists
            return True
        raise EngineUnreachable(refusal_message(refusal)) from None


def find_job(api: Api, namespace: str, name: str) -> Json | None:
    """Return the Job's current state on the server; None if it does not exist. Raises ``EngineUnreachable``."""
    try:
        return api.get(f"{JOBS.format(namespace)}/{name}")
    except Refusal as refusal:
        if refusal.code == 404:
            return None
        raise EngineUnreachable(refusal_message(refusal)) from None


def chown_job_files(site: Site, launch: LaunchFile) -> None:
    """If the service is root, give the job's and the attempt's directories, and their entries, to the pods' user. Raises
    ``OSError``."""
    if os.getuid() != 0:
        return
    job, attempt = Path(launch.job_root), Path(launch.attempt_dir)
    for path in {job, *job.iterdir(), attempt.parent, attempt, *attempt.iterdir()}:
        os.chown(path, site.user, site.group, follow_symlinks=False)


def _create_if_absent(api: Api, kind: str, manifest: Json) -> Json | None:
    """Create an object and return it; None if one with that name exists. Raises ``Refusal``."""
    try:
        return api.create(kind.format(manifest["metadata"]["namespace"]), manifest)
    except Refusal as refusal:
        if refusal.code == 409 and refusal.reason == "AlreadyExists":
            return None
        raise


def _create_job(api: Api, site: Site, launch: LaunchFile) -> Json:
    """Create the attempt's Job and return it, or the existing one. Raises ``LaunchError`` if that is not this attempt's, and
    ``Refusal``."""
    manifest = manifests.job_manifest(site, launch)
    created = _create_if_absent(api, JOBS, manifest)
    if created is not None:
        return created
    found = api.get(_object_path(JOBS, manifest))
    labels, own = found["metadata"].get("labels") or {}, manifests.labels_of(site, launch)
    if {key: labels.get(key) for key in own} != own:
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        raise LaunchError(
            f"the Job {name} already exists in {namespace}, and does not belong to this service: delete it"
        )
    return found


def _object_path(kind: str, manifest: Json) -> str:
    """Return the object's path in the API. ``kind``: one of the paths such as ``JOBS``."""
    return f"{kind.format(manifest['metadata']['namespace'])}/{manifest['metadata']['name']}"
