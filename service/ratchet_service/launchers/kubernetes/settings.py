"""The launchers file's settings for Kubernetes, and the effective values for one job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, field_validator

from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.launcher import KubernetesLauncherSpec
from ratchet_contract.spec.types import Seconds, SpecModel

_NAME: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_LABEL: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_ID = Annotated[int | None, Field(ge=1, le=2**31 - 1)]


class Settings(SpecModel):
    """The keys under ``kubernetes:`` in the launchers file."""

    claim: str = Field(
        pattern=_NAME,
        description="PersistentVolumeClaim (ReadWriteMany) that holds the run directory; in every namespace.",
    )
    url: str = Field(pattern=r"^https?://[^\s]+$", description="The service's address as pods see it.")
    namespace: str = Field("default", pattern=_LABEL, description="Default of jobs that name none.")
    namespaces: list[Annotated[str, Field(pattern=_LABEL)]] = Field(
        [], description="Other namespaces that jobs may name."
    )
    image: str | None = Field(None, description="Default of jobs that name none.")
    sub_path_prefix: str = Field("", description="Path of the run directory in the claim; empty: the claim's root.")
    kubeconfig: str | None = Field(
        None, description="Kubeconfig file; null: the pod's service account, else KUBECONFIG."
    )
    context: str | None = Field(None, description="Context of the kubeconfig.")
    run_as_user: _ID = Field(None, description="User id of the pods; null: the service's own user.")
    run_as_group: _ID = Field(None, description="null: the service's own group.")
    fs_group: _ID = Field(
        None, description="Group that Kubernetes makes the owner of volumes (fsGroup); null: the group of the pods."
    )
    defaults: KubernetesLauncherSpec = Field(
        KubernetesLauncherSpec(), description="Defaults for keys of a job's `launcher`."
    )
    max_nodes: int | None = Field(None, ge=1, le=1024)
    allow_host_access: bool = Field(
        False, description="Jobs may use nodes' directories, network and process table, and privileges."
    )
    withheld: list[str] = Field(
        [],
        description="Names of Secrets, ConfigMaps, claims and service accounts that no job may use: the service's own.",
    )
    fault_patience: Seconds = Field(
        300.0,
        description="Time limit of a pod whose image cannot be pulled, whose container cannot be created, whose claim does "
        "not exist, or that the cluster forbids.",
    )
    start_patience: Seconds = Field(
        1800.0, description="From a pod's scheduling to its container's start, image pull included."
    )
    lost_after: Seconds | None = Field(
        300.0,
        description="Seconds until a pod on a node that does not answer counts as fenced, and the job continues. They begin "
        "10 s after the end of the pod's grace. null: never, until an administrator deletes the pod.",
    )
    result_patience: float = Field(
        15.0, ge=0, description="Seconds that a file system may take to show an ended pod's last file."
    )

    @field_validator("sub_path_prefix")
    @classmethod
    def _check_sub_path(cls, value: str) -> str:
        if value.startswith("/") or ".." in value.split("/"):
            raise ValueError("must be a path below the claim's root, without '..'")
        return value.strip("/")


@dataclass(frozen=True)
class Site:
    """The settings together with the run directory ``home`` and the ids of the pods' user and group."""

    settings: Settings
    home: HomePaths
    user: int
    group: int

    @property
    def instance(self) -> str:
        """A short id of this service, by which its objects in a namespace are distinguished from those of others."""
        settings = self.settings
        text = f"{self.home.instance_id} {settings.claim} {settings.sub_path_prefix}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that jobs may use, the setting ``namespace`` first."""
        return (self.settings.namespace, *(n for n in self.settings.namespaces if n != self.settings.namespace))

    def effective_launcher(self, spec: JobSpec) -> KubernetesLauncherSpec:
        """Return the keys under ``launcher`` of the job's spec, with the site's defaults for those that it does not set."""
        assert isinstance(spec.launcher, KubernetesLauncherSpec)
        return spec.launcher.with_defaults(self.settings.defaults)

    def namespace(self, spec: JobSpec) -> str:
        """Return the namespace of the job's objects."""
        return self.effective_launcher(spec).namespace or self.settings.namespace

    def image(self, spec: JobSpec) -> str | None:
        """Return the job's image, or the site's default; None: there is none."""
        return spec.image or self.settings.image


def parse_settings(home: HomePaths, raw_settings: Mapping[str, Any]) -> Site:
    """Check the settings from the launchers file, and return them with the pods' user and group. Raises ``ValueError``."""
    if find_spec("kubernetes") is None:
        raise ValueError("the launcher kubernetes needs a package: pip install 'ratchet-train[kubernetes]'")
    try:
        settings = Settings.model_validate(dict(raw_settings))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ValueError(f"the settings of the launcher kubernetes: {'; '.join(faults)}") from None
    user = settings.run_as_user or os.getuid()
    if user == 0:
        raise ValueError(
            "the settings of the launcher kubernetes: run_as_user: the service runs as root, but pods do not: name the user "
            "of the pods, who will own the jobs' directories"
        )
    group = settings.run_as_group or os.getgid() or user
    return Site(settings, home, user, group)
