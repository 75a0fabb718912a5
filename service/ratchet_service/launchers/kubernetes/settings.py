"""What the launchers file says of Kubernetes, and what follows from it for one job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, field_validator

from ratchet_contract.paths import HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_base import Seconds, SpecModel
from ratchet_contract.spec_engines import KubernetesLauncherSpec

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
    namespace: str = Field("default", pattern=_LABEL, description="Of jobs that name none.")
    namespaces: list[Annotated[str, Field(pattern=_LABEL)]] = Field([], description="Others that jobs may name.")
    image: str | None = Field(None, description="Of jobs that name none.")
    sub_path_prefix: str = Field("", description="Where in the claim the run directory lies; empty: the claim is it.")
    kubeconfig: str | None = Field(None, description="A file; null: the pod's service account, else KUBECONFIG.")
    context: str | None = Field(None, description="Of the kubeconfig.")
    run_as_user: _ID = Field(None, description="Of the pods; null: the service's own user.")
    run_as_group: _ID = Field(None, description="null: the service's own group.")
    fs_group: _ID = Field(
        None, description="Owner of volumes that Kubernetes gives to a group; null: the group of the pods."
    )
    defaults: KubernetesLauncherSpec = Field(
        KubernetesLauncherSpec(), description="Keys of a job's `launcher`, for jobs that do not give them."
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
        description="Until a pod is given up whose image cannot be pulled, whose container cannot be made, whose claim is not "
        "there, or that the cluster forbids.",
    )
    start_patience: Seconds = Field(
        1800.0, description="From a pod's node to its container's start, image pull included."
    )
    lost_after: Seconds | None = Field(
        300.0,
        description="Seconds after the end of its grace that a pod on a node that does not answer counts as fenced, and the job "
        "goes on; null: never, a person decides.",
    )
    result_patience: float = Field(
        15.0, ge=0, description="Seconds that a file system may take to show an ended pod's last file."
    )

    @field_validator("sub_path_prefix")
    @classmethod
    def _within(cls, value: str) -> str:
        if value.startswith("/") or ".." in value.split("/"):
            raise ValueError("must be a path below the claim's root, without '..'")
        return value.strip("/")


@dataclass(frozen=True)
class Site:
    """The settings with what this process knows besides: the run directory, and who its files belong to."""

    settings: Settings
    home: HomePaths
    user: int
    group: int

    @property
    def instance(self) -> str:
        """Whose the objects in a namespace are: of the service on this claim, wherever in it and here the run directory lies."""
        settings = self.settings
        text = f"{self.home.instance} {settings.claim} {settings.sub_path_prefix}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.settings.namespace, *(n for n in self.settings.namespaces if n != self.settings.namespace))

    def launcher(self, spec: JobSpec) -> KubernetesLauncherSpec:
        """The job's keys over the site's defaults, key by key."""
        assert isinstance(spec.launcher, KubernetesLauncherSpec)
        return spec.launcher.over(self.settings.defaults)

    def namespace(self, spec: JobSpec) -> str:
        return self.launcher(spec).namespace or self.settings.namespace

    def image(self, spec: JobSpec) -> str | None:
        return spec.image or self.settings.image


def parse(home: HomePaths, given: Mapping[str, Any]) -> Site:
    """Raises ``ValueError`` with a sentence that names the key."""
    if find_spec("kubernetes") is None:
        raise ValueError("the launcher kubernetes needs a package: pip install 'ratchet-train[kubernetes]'")
    try:
        settings = Settings.model_validate(dict(given))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ValueError(f"the settings of the launcher kubernetes: {'; '.join(faults)}") from None
    user = settings.run_as_user or os.getuid()
    if user == 0:
        raise ValueError(
            "the settings of the launcher kubernetes: run_as_user: the service runs as root, and no pod does: name the user "
            "of the pods, to whom the jobs' directories will be given"
        )
    group = settings.run_as_group or os.getgid() or user
    return Site(settings, home, user, group)
