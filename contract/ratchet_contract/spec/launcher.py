"""The spec's ``launcher`` and ``volumes``, which say where a job runs. Settings with the same meaning on all engines are keys of
the job instead."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from ratchet_contract.spec.types import Seconds, Size, SpecModel

DNS_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
ABSOLUTE_PATH = r"^/[^:\x00\n]*$"
SLURM_WORD = r"^[A-Za-z0-9_.:,\[\]@&|*()=-]+$"
_OPTION = re.compile(r"[a-z][a-z-]*")


def _option(name: str) -> str:
    """Return ``name``. Raises ``ValueError`` if it does not look like a long option of sbatch, or is reserved for
    Ratchet."""
    if not _OPTION.fullmatch(name):
        raise ValueError(f"{name!r} is not the long name of an option of sbatch")
    if name in OWNED_OPTIONS:
        raise ValueError(f"{name} is set by Ratchet and cannot be set here")
    return name


def _line(value: str) -> str:
    if "\n" in value or "\0" in value:
        raise ValueError("the value of an option must not have a line break")
    return value


class VolumeSpec(SpecModel):
    """A volume mounted for the ranks at ``mount_path``. Exactly one source is set."""

    mount_path: str = Field(pattern=ABSOLUTE_PATH, description="Absolute path in the ranks' containers.")
    host_path: str | None = Field(None, pattern=ABSOLUTE_PATH, description="A directory that exists on every node.")
    claim: str | None = Field(None, pattern=DNS_NAME, description="Kubernetes: a PersistentVolumeClaim.")
    config_map: str | None = Field(None, pattern=DNS_NAME, description="Kubernetes: a ConfigMap.")
    secret: str | None = Field(None, pattern=DNS_NAME, description="Kubernetes: a Secret, whose keys appear as files.")
    empty_dir: Size | None = Field(None, description="Kubernetes: scratch space of this size on the node.")
    sub_path: str | None = Field(None, description="Kubernetes: a directory within the source.")
    read_only: bool = Field(True, description="false: the ranks may write there. This is the default for an empty_dir.")

    @property
    def source(self) -> str:
        """The name of the only source that is set, such as ``claim``."""
        return self._set_sources()[0]

    def _set_sources(self) -> list[str]:
        """Return the names of the sources that are set."""
        kinds = ("host_path", "claim", "config_map", "secret", "empty_dir")
        return [kind for kind in kinds if getattr(self, kind) is not None]

    @model_validator(mode="before")
    @classmethod
    def _scratch(cls, data: Any) -> Any:
        """Make an ``empty_dir`` writable unless ``read_only`` is given."""
        if isinstance(data, dict) and data.get("empty_dir") is not None and "read_only" not in data:
            return {**data, "read_only": False}
        return data

    @model_validator(mode="after")
    def _one_source(self) -> VolumeSpec:
        """Raise ``ValueError`` unless exactly one source is set."""
        if len(self._set_sources()) != 1:
            raise ValueError("set exactly one of host_path, claim, config_map, secret and empty_dir")
        return self


class EngineSpec(SpecModel):
    """Base of the launchers' specs. Keys that a job omits are not stored: the site's defaults apply at every launch."""

    @model_serializer(mode="wrap")
    def _only_set_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize only ``kind`` and the keys that were set."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if key == "kind" or key in self.model_fields_set}

    def with_defaults(self, defaults: Self) -> Self:
        """Return the spec with values of ``defaults``, of the same class, for the keys that are not set here."""
        return type(self).model_validate(defaults.model_dump() | self.model_dump())


class LocalLauncherSpec(EngineSpec):
    """The local launcher: agents and ranks are processes of the service's own machine."""

    kind: Literal["local"] = "local"


class KubernetesLauncherSpec(EngineSpec):
    """Each attempt is one Indexed Job with one pod per node. Omitted keys come from the service's launchers file."""

    kind: Literal["kubernetes"] = "kubernetes"
    namespace: str | None = Field(
        None, pattern=DNS_NAME, description="Namespace of the Job; null: the namespace of the service."
    )
    queue: str | None = Field(
        None, pattern=DNS_NAME, description="Kueue's LocalQueue; the Job is created suspended, and Kueue starts it."
    )
    queue_priority: str | None = Field(None, pattern=DNS_NAME, description="Kueue's WorkloadPriorityClass.")
    queue_topology: dict[Literal["required", "preferred"], str] | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="`required` or `preferred`, and a node label, such as `required: "
        "cloud.provider.com/topology-rack`. Kueue places the pods within one domain of this label (one "
        "rack); with `preferred`, only if it can.",
    )
    priority_class: str | None = Field(
        None,
        pattern=DNS_NAME,
        description="Priority class of the pods; Kubernetes may preempt pods of lower classes for them.",
    )
    service_account: str | None = Field(
        None, pattern=DNS_NAME, description="Service account of the pods; null: the namespace's default."
    )
    node_selector: dict[str, str] = Field({}, description="Labels that a node must have.")
    tolerations: list[dict[str, Any]] = Field(
        [], description="As in a pod's spec. Taints of the job's own kind of GPU are tolerated by default."
    )
    affinity: dict[str, Any] = Field({}, description="As in a pod's spec.")
    topology_spread: list[dict[str, Any]] | None = Field(
        None,
        description="As a pod's topologySpreadConstraints; the labelSelector may be left out. null: pods of one "
        "attempt are spread over as many machines as possible.",
    )
    image_pull_secrets: list[str] = Field([], description="Names of Secrets.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    shm_size: Size | None = Field(
        None, description="Size of /dev/shm. null: as much as resources.memory, or 8Gi if resources.memory is not set."
    )
    tmp_size: Size = Field("10Gi", description="Size limit of /tmp, on the machine's disk. A pod that fills it fails.")
    run_as_user: int | None = Field(
        None, ge=1, le=2**31 - 1, description="User id in the pods; null: the service's own user id."
    )
    labels: dict[str, str] = Field({}, description="Labels of Job and pods, in addition to Ratchet's own.")
    annotations: dict[str, str] = Field({}, description="Annotations of the pods.")
    ttl_seconds_after_finished: int = Field(3600, ge=0, description="Time until Kubernetes deletes the ended Job.")
    pod_patch: dict[str, Any] = Field(
        {},
        description="JSON merge patch (RFC 7396) of the pod template, for settings without a key here; entries of containers, "
        "initContainers and volumes are merged by name.",
    )


class SlurmLauncherSpec(EngineSpec):
    """Each attempt is one batch job; srun starts one agent per node. Omitted keys come from the service's launchers file."""

    kind: Literal["slurm"] = "slurm"
    partition: str | None = Field(None, pattern=SLURM_WORD)
    account: str | None = Field(None, pattern=SLURM_WORD)
    qos: str | None = Field(None, pattern=SLURM_WORD)
    constraint: str | None = Field(None, pattern=SLURM_WORD)
    reservation: str | None = Field(None, pattern=SLURM_WORD)
    gres: str | None = Field(
        None,
        pattern=SLURM_WORD,
        description="Generic resources of Slurm; null: one gpu per rank, of the type in resources.gpu.",
    )
    time_limit: Seconds | None = Field(
        None,
        ge=120,
        description="Time limit of one attempt. The job saves before the limit is reached, and continues in the next "
        "attempt.",
    )
    exclusive: bool = Field(False, description="true: the attempt gets whole nodes.")
    container: Literal["apptainer", "pyxis"] = Field(
        "apptainer", description="Container runtime for `image`, if one is set."
    )
    setup: list[str] = Field([], description="Shell lines before srun, such as `module load cuda`.")
    options: dict[Annotated[str, AfterValidator(_option)], Annotated[str, AfterValidator(_line)] | None] = Field(
        {}, description="More options of sbatch, without `--`; null: an option without a value."
    )

    @field_validator("setup")
    @classmethod
    def _lines(cls, value: list[str]) -> list[str]:
        """Raise ``ValueError`` if a line of ``setup`` has a NUL character."""
        if any("\0" in line for line in value):
            raise ValueError("a line has a NUL character")
        return value


OWNED_OPTIONS: Final = frozenset(
    {
        "job-name", "nodes", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "signal", "array", "output", "error",
        "open-mode", "export", "export-file", "wrap", "parsable", "wait", "comment", "kill-on-bad-exit", "no-kill",
    }
)  # fmt: skip


class OtherLauncherSpec(EngineSpec):
    """A launcher that another package provides (entry point group ``ratchet.launchers``)."""

    kind: str = Field(pattern=r"^[a-z][-a-z0-9]{0,62}$", description="The entry point's name.")
    options: dict[str, Any] = Field({}, description="As documented by that launcher.")


def _launcher_kind(value: Any) -> str:
    """Return the union's tag for a launcher's value: its ``kind``, or ``other`` for a launcher of another package."""
    kind = value.get("kind", "local") if isinstance(value, dict) else getattr(value, "kind", "local")
    return kind if isinstance(kind, str) and kind in LAUNCHER_SPECS and kind != "other" else "other"


LAUNCHER_SPECS: Final[dict[str, type[EngineSpec]]] = {
    "local": LocalLauncherSpec,
    "kubernetes": KubernetesLauncherSpec,
    "slurm": SlurmLauncherSpec,
    "other": OtherLauncherSpec,
}


LauncherSpec = Annotated[
    Annotated[LocalLauncherSpec, Tag("local")]
    | Annotated[KubernetesLauncherSpec, Tag("kubernetes")]
    | Annotated[SlurmLauncherSpec, Tag("slurm")]
    | Annotated[OtherLauncherSpec, Tag("other")],
    Discriminator(_launcher_kind),
]
