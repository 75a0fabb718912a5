"""The specification of a job. Public import path of ``ratchet_contract.spec.job``."""

from ratchet_contract.spec.job import (
    CodeSpec,
    DdpSpec,
    EnvName,
    JobSpec,
    JsonValue,
    Resolved,
    ResourcesSpec,
    SecretKey,
    SecretSpec,
    StartSpec,
    TaskSpec,
    WorldSpec,
)

__all__ = [
    "CodeSpec",
    "DdpSpec",
    "EnvName",
    "JobSpec",
    "JsonValue",
    "Resolved",
    "ResourcesSpec",
    "SecretKey",
    "SecretSpec",
    "StartSpec",
    "TaskSpec",
    "WorldSpec",
]
